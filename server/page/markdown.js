// Shows a growing text as Markdown in blocks, with highlighted code. The text is untrusted: only the elements and
// attributes in RULES pass. Unchanged blocks keep their elements, so that they do not flicker.

import { make, makeCopyButton, setText } from "./element.js";
import { drawMathematics, readMathematics } from "./mathematics.js";
import DOMPurify from "./vendor/dompurify-3.4.18/purify.js";
import highlight from "./vendor/highlight-11.12.0/core.js";
import MarkdownIt from "./vendor/markdown-it-15.0.3/markdown-it.js";

// --- sanitizing the libraries' HTML --------------------------------------------------------------

const ADDRESS = /^(?:https?:\/\/|mailto:)/i;
const CLASS = /^(?:language-[\w+#.-]{1,40}|hljs-[\w-]{1,40}|level-[1-6]|task|math|display|(?:left|center|right))$/;
const RULES = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "em", "h3", "hr", "li", "ol", "p", "pre", "s", "span", "strong",
    "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["start"],
  ALLOWED_URI_REGEXP: ADDRESS,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("uponSanitizeAttribute", (_, attribute) => {
  if (attribute.attrName !== "class") return;
  attribute.attrValue = attribute.attrValue.split(/\s+/).filter((name) => CLASS.test(name)).join(" ");
  if (!attribute.attrValue) attribute.keepAttr = false;
});

DOMPurify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName !== "A") return;
  element.setAttribute("target", "_blank");
  element.setAttribute("rel", "noopener noreferrer nofollow");
});

const sanitize = (html) => DOMPurify.sanitize(html, RULES);

// --- code blocks ---------------------------------------------------------------------------------

const GRAMMARS = "./vendor/highlight-11.12.0";
const LONGEST_CODE_CHARS = 60_000;
// Longer code is highlighted only when it is complete, since every new piece would highlight the whole code again.
const LONGEST_OPEN_CODE_CHARS = 6_000;
const LANGUAGES = new Set([
  "bash", "c", "cpp", "css", "diff", "dockerfile", "go", "ini", "java", "javascript", "json", "kotlin",
  "makefile", "markdown", "python", "ruby", "rust", "shell", "sql", "swift", "typescript", "xml", "yaml",
]);
const OTHER_NAMES = new Map(Object.entries({
  "c++": "cpp", cc: "cpp", cxx: "cpp", h: "c", hpp: "cpp", console: "shell", docker: "dockerfile",
  golang: "go", html: "xml", js: "javascript", jsonc: "json", jsx: "javascript", kt: "kotlin",
  make: "makefile", md: "markdown", mjs: "javascript", patch: "diff", py: "python", python3: "python",
  rb: "ruby", rs: "rust", sh: "bash", svg: "xml", toml: "ini", ts: "typescript", tsx: "typescript",
  yml: "yaml", zsh: "bash",
}));

// Loads the grammar of a language. Resolves to the language's name, or to null if there is no grammar.
async function loadGrammar(name) {
  const lower = name.toLowerCase();
  const language = OTHER_NAMES.get(lower) ?? lower;
  if (!LANGUAGES.has(language)) return null;
  const grammar = await import(`${GRAMMARS}/${language}.js`);
  if (!highlight.getLanguage(language)) highlight.registerLanguage(language, grammar.default);
  return language;
}

class CodeBlock {
  #code = make("code");
  #language;
  #drawn = "";
  #text = "";

  constructor(language) {
    // If the grammar cannot be loaded, the code stays plain.
    this.#language = loadGrammar(language).catch(() => null);
    const copy = makeCopyButton("Copy code", () => this.#text);
    const head = make("div", "code-head", make("span", {}, language), copy);
    this.element = make("div", "code", head, make("pre", { tabIndex: 0 }, this.#code));
  }

  // Shows the code, which is highlighted if possible. If isOpen is true, more code may follow.
  async show(text, isOpen) {
    this.#text = text;
    setText(this.#code, text);
    if (text.length > (isOpen ? LONGEST_OPEN_CODE_CHARS : LONGEST_CODE_CHARS)) return;
    const language = await this.#language;
    if (!language || this.#text !== text || this.#drawn === text) return;
    this.#drawn = text;
    this.#code.replaceChildren(sanitize(highlight.highlight(text, { language, ignoreIllegals: true }).value));
  }
}

// --- Markdown blocks ------------------------------------------------------------------------------

// Maximum nesting of Markdown. A block with deeper nesting is shown as plain text.
const DEEPEST = 32;
const LONGEST_BLOCK_CHARS = 60_000;
const TASK = /^\[([ xX])\]\s/;

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 2 * DEEPEST });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (address) => ADDRESS.test(address);
readMathematics(parser);
parser.renderer.rules.image = (tokens, place) => image(tokens, place);
parser.core.ruler.push("page", ({ tokens }) => tokens.forEach((token, place) => adapt(token, tokens[place - 2])));

// Replaces an image, which the page never fetches, by a link. An image inside a link becomes its description.
function image(tokens, place) {
  const escape = parser.utils.escapeHtml;
  const token = tokens[place];
  const text = escape(token.content || token.attrGet("src"));
  const around = tokens.slice(0, place).reduce((open, one) => {
    return open + (one.type === "link_open") - (one.type === "link_close");
  }, 0);
  return around ? text : `<a href="${escape(token.attrGet("src"))}">${text}</a>`;
}

// Turns all headings into h3, below the page's own headings. Turns the alignment of table cells into classes, since
// RULES forbid style attributes. Adds check boxes to tasks in lists.
function adapt(token, itemOpen) {
  if (token.type === "heading_open" || token.type === "heading_close") {
    if (token.nesting === 1) token.attrJoin("class", `level-${token.tag[1]}`);
    token.tag = "h3";
  } else if (token.type === "th_open" || token.type === "td_open") {
    const side = /text-align:(left|center|right)/.exec(token.attrGet("style") ?? "");
    token.attrs = side ? [["class", side[1]]] : null;
  } else if (token.type === "inline" && itemOpen?.type === "list_item_open") {
    const [first] = token.children;
    const task = first?.type === "text" ? TASK.exec(first.content) : null;
    if (!task) return;
    itemOpen.attrJoin("class", "task");
    first.content = (task[1] === " " ? "☐ " : "☑ ") + first.content.slice(task[0].length);
  }
}

function isTooDeep(tokens) {
  let depth = 0;
  for (const token of tokens) {
    depth += token.nesting;
    if (depth > DEEPEST) return true;
    if (token.children && isTooDeep(token.children)) return true;
  }
  return false;
}

// Returns the text's top-level blocks in order, each with its first line's number. isOpen is true if more may follow.
function parseBlocks(text, isOpen) {
  if (longestBlock(text) > LONGEST_BLOCK_CHARS) return [{ kind: "plain", text, line: 0 }];
  const env = { isOpen };
  const tokens = parser.parse(text, env);
  const blocks = [];
  const lines = text.split("\n");
  for (let begin = 0, depth = 0, place = 0; place < tokens.length; place += 1) {
    depth += tokens[place].nesting;
    if (depth !== 0) continue;
    const part = tokens.slice(begin, place + 1);
    begin = place + 1;
    const [{ map, type, info, content }] = part;
    if (type === "fence" || type === "code_block") {
      const language = info.trim().split(/\s+/)[0];
      blocks.push({ kind: "code", language, text: content.replace(/\n$/, ""), line: map[0] });
    } else if (isTooDeep(part)) {
      blocks.push({ kind: "plain", text: lines.slice(...map).join("\n"), line: map[0] });
    } else {
      blocks.push({ kind: "html", text: parser.renderer.render(part, parser.options, env), line: map[0] });
    }
  }
  return blocks;
}

// Returns the length of the longest paragraph. The parser's time grows faster than this length.
function longestBlock(text) {
  let longest = 0;
  for (const part of text.split(/\n\s*\n|\n {0,3}(?:```|~~~)/)) longest = Math.max(longest, part.length);
  return longest;
}

function makeBlock(block) {
  if (block.kind === "plain") return make("p", "plain", block.text);
  const element = make("div", "block", sanitize(block.text));
  drawMathematics(element);
  for (const code of element.querySelectorAll("pre > code")) replaceNested(code);
  for (const table of element.querySelectorAll("table")) {
    const frame = make("div", { className: "wide", tabIndex: 0 });
    table.replaceWith(frame);
    frame.append(table);
  }
  return element;
}

// Replaces a code element inside a list or a quotation by a CodeBlock.
function replaceNested(code) {
  const block = new CodeBlock(/^language-(.*)$/.exec(code.className)?.[1] ?? "");
  code.parentElement.replaceWith(block.element);
  block.show(code.textContent.replace(/\n$/, ""), false);
}

export class MarkdownView {
  #target;
  #shown = [];
  #settledChars = 0;
  #settledBlocks = 0;

  constructor(target) {
    this.#target = target;
  }

  // Shows the part of a text that has arrived. It must begin with the text of the previous call.
  write(text) {
    const rest = text.slice(this.#settledChars);
    const blocks = parseBlocks(rest, true);
    this.#reconcile(this.#settledBlocks, blocks, true);
    this.#settle(rest, blocks);
  }

  // Shows the complete text, parsed again from its start: a later block may define a link of an earlier block.
  end(text) {
    this.#reconcile(0, parseBlocks(text, false), false);
  }

  // Excludes all blocks before the last one from later parsing, once the last block has a complete line.
  #settle(rest, blocks) {
    const last = blocks.at(-1);
    if (blocks.length < 2 || rest.includes("\r")) return;
    let place = 0;
    for (let line = 0; line < last.line; line += 1) place = rest.indexOf("\n", place) + 1;
    if (!rest.includes("\n", place)) return;
    this.#settledChars += place;
    this.#settledBlocks += blocks.length - 1;
  }

  #reconcile(first, blocks, isOpen) {
    blocks.forEach((block, number) => {
      const place = first + number;
      const open = isOpen && number === blocks.length - 1;
      const shown = this.#shown[place];
      const same = shown?.kind === block.kind && shown.language === block.language;
      if (same && block.kind === "code") shown.code.show(block.text, open);
      else if (!same || shown.text !== block.text) this.#put(place, block, open);
    });
    for (const old of this.#shown.splice(first + blocks.length)) old.element.remove();
  }

  #put(place, block, open) {
    const code = block.kind === "code" ? new CodeBlock(block.language) : null;
    code?.show(block.text, open);
    const element = code?.element ?? makeBlock(block);
    const old = this.#shown[place];
    if (old) old.element.replaceWith(element);
    else this.#target.append(element);
    this.#shown[place] = { ...block, code, element };
  }
}

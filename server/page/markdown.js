// Markdown as blocks of HTML, which safe.js makes elements of. A block of code is its text.

import MarkdownIt from "./vendor/markdown-it-15.0.3/markdown-it.js";
import { ADDRESS } from "./safe.js";

// Deeper than anybody writes; what is, is shown as it was written.
const DEEPEST = 32;
const LONGEST_BLOCK_CHARS = 60_000;
const TASK = /^\[([ xX])\]\s/;

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 2 * DEEPEST });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (address) => ADDRESS.test(address);
parser.renderer.rules.image = (tokens, place) => image(tokens, place);
parser.core.ruler.push("page", ({ tokens }) => tokens.forEach((token, place) => adapt(token, tokens[place - 2])));

// An image is never fetched: it is a link, or its description where there is a link around it.
function image(tokens, place) {
  const escape = parser.utils.escapeHtml;
  const token = tokens[place];
  const text = escape(token.content || token.attrGet("src"));
  const around = tokens.slice(0, place).reduce((open, one) => {
    return open + (one.type === "link_open") - (one.type === "link_close");
  }, 0);
  return around ? text : `<a href="${escape(token.attrGet("src"))}">${text}</a>`;
}

// The page's own headings stand above those of a text, whatever their level; alignment is a class, as no
// style of a text is let through; and tasks have boxes.
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

// Whether elements would stand in each other deeper than DEEPEST.
function isTooDeep(tokens) {
  let depth = 0;
  for (const token of tokens) {
    depth += token.nesting;
    if (depth > DEEPEST) return true;
    if (token.children && isTooDeep(token.children)) return true;
  }
  return false;
}

// The blocks that stand beside each other, in order. line: where one begins.
export function blocksOf(text) {
  if (longestBlock(text) > LONGEST_BLOCK_CHARS) return [{ kind: "plain", text, line: 0 }];
  const env = {};
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

// In characters, of what no empty line divides and is no code: what the time that parsing takes can rise
// with faster than its length.
function longestBlock(text) {
  let longest = 0;
  for (const part of text.split(/\n\s*\n|\n {0,3}(?:```|~~~)/)) longest = Math.max(longest, part.length);
  return longest;
}

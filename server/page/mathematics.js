// Finds formulas in Markdown ($…$, $$…$$, \(…\) and \[…\]), and draws them with KaTeX, loaded at the first formula.

import { make } from "./element.js";

const LIBRARY = "/page/vendor/katex-0.19.1";
const LONGEST_CHARS = 4000;
// Maximum of drawn formulas in one block of text. Later formulas stay text, so that drawing does not take long.
const MOST_FORMULAS = 200;
// KaTeX's option trust keeps its default, which forbids commands that load, link or style anything.
const OPTIONS = { strict: "ignore", maxSize: 20, maxExpand: 200 };
const ENDS = new Map([["$$", "$$"], ["\\[", "\\]"]]);
// So that prices stay text, a formula in $…$ neither begins nor ends with a space, and no digit follows it.
const INLINE = [
  { pattern: /\$\$((?:\\.|[^\\$])+)\$\$/sy, isDisplay: true },
  { pattern: /\$(?![\s$])((?:\\.|[^\\$`\n])+)(?<!\s)\$(?!\d)/y, isDisplay: false },
  { pattern: /\\\[((?:\\[^()[\]]|[^\\])+)\\\]/sy, isDisplay: true },
  { pattern: /\\\(((?:\\[^()[\]]|[^\\])+)\\\)/sy, isDisplay: false },
];

export function readMathematics(parser) {
  parser.inline.ruler.before("escape", "math", readInline);
  parser.block.ruler.before("fence", "math", readBlock, { alt: ["paragraph", "blockquote", "list"] });
  parser.renderer.rules.math = (tokens, place) => {
    const { content, info } = tokens[place];
    return `<code class="math ${info}">${parser.utils.escapeHtml(content)}</code>`;
  };
}

function readInline(state, isSilent) {
  if (!"$\\".includes(state.src[state.pos])) return false;
  for (const { pattern, isDisplay } of INLINE) {
    pattern.lastIndex = state.pos;
    const match = pattern.exec(state.src);
    if (!match || match[0].length > LONGEST_CHARS || pattern.lastIndex > state.posMax) continue;
    if (!isSilent) push(state, match[1], isDisplay ? "display" : "");
    state.pos = pattern.lastIndex;
    return true;
  }
  return false;
}

// Reads a formula after a line that has only $$ or \[. While the text grows, the formula's end may be missing.
function readBlock(state, first, afterLast, isSilent) {
  const lineAt = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trim();
  const end = ENDS.get(lineAt(first));
  if (!end || state.sCount[first] - state.blkIndent > 3) return false;
  let last = first + 1;
  while (last < afterLast && !lineAt(last).endsWith(end) && state.sCount[last] >= state.blkIndent) last += 1;
  const isClosed = last < afterLast && lineAt(last).endsWith(end);
  if (!isClosed && !state.env.isOpen) return false;
  if (isSilent) return true;
  const text = state.getLines(first + 1, isClosed ? last + 1 : last, state.blkIndent, false).trimEnd();
  state.line = isClosed ? last + 1 : last;
  push(state, isClosed ? text.slice(0, -end.length) : text, "display").map = [first, state.line];
  return true;
}

function push(state, content, info) {
  return Object.assign(state.push("math", "code", 0), { content, info });
}

let loading = null;

async function load() {
  document.head.append(make("link", { rel: "stylesheet", href: `${LIBRARY}/katex.css` }));
  await import(`${LIBRARY}/katex.js`);
}

// Draws the formulas in an element. A formula that KaTeX does not know stays as it was written.
export function drawMathematics(element) {
  const formulas = [...element.querySelectorAll("code.math")].slice(0, MOST_FORMULAS);
  if (!formulas.length) return;
  if (globalThis.katex) {
    for (const formula of formulas) draw(formula);
  } else {
    loading ??= load().catch(() => (loading = null));
    loading.then(() => globalThis.katex && drawMathematics(element));
  }
}

function draw(formula) {
  const displayMode = formula.classList.contains("display");
  try {
    const tree = globalThis.katex.__renderToDomTree(formula.textContent, { ...OPTIONS, displayMode });
    dropStyles(tree);
    const scrolls = displayMode ? { tabIndex: 0 } : {};
    formula.replaceWith(make("span", { className: formula.className, ...scrolls }, tree.toNode()));
  } catch (error) {
    if (error.name !== "ParseError") throw error;
  }
}

// Drops the style attributes of MathML, since the page's policy forbids them. KaTeX sets other styles as properties.
function dropStyles(node) {
  delete node.attributes?.style;
  for (const child of node.children ?? []) dropStyles(child);
}

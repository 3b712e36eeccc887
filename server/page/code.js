// A block of code: its language, a button that copies it, and colours where its language is known.

import { copyButton } from "./copy.js";
import { made, setText } from "./element.js";
import { safe } from "./safe.js";
import highlight from "./vendor/highlight-11.12.0/core.js";

const GRAMMARS = "./vendor/highlight-11.12.0";
const LONGEST_CHARS = 60_000;
// Of code that is still being written: it is coloured anew each time.
const LONGEST_OPEN_CHARS = 6_000;

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
const loading = new Map();

// Resolves when the language's grammar is there; to null for a language that has none here.
function grammar(name) {
  const lower = name.toLowerCase();
  const language = OTHER_NAMES.get(lower) ?? lower;
  if (!LANGUAGES.has(language)) return null;
  if (!loading.has(language)) {
    const loaded = import(`${GRAMMARS}/${language}.js`).then((module) => {
      highlight.registerLanguage(language, module.default);
    });
    loading.set(language, loaded);
  }
  return { language, loaded: loading.get(language) };
}

export class CodeBlock {
  #code = made("code");
  #grammar;
  #drawn = "";
  #text = "";

  constructor(language) {
    this.language = language;
    this.#grammar = grammar(language);
    this.element = made("div", "code");
    const head = made("div", "code-head");
    head.append(made("span", "", language), copyButton("Copy code", () => this.#text));
    const pre = made("pre");
    pre.tabIndex = 0;
    pre.append(this.#code);
    this.element.append(head, pre);
  }

  // isOpen: whether more of it may follow.
  show(text, isOpen) {
    this.#text = text;
    setText(this.#code, text);
    if (text.length > (isOpen ? LONGEST_OPEN_CHARS : LONGEST_CHARS)) return;
    this.#grammar?.loaded.then(() => this.#colour(text), () => {});
  }

  #colour(text) {
    if (this.#text !== text || this.#drawn === text) return;
    this.#drawn = text;
    const { language } = this.#grammar;
    this.#code.replaceChildren(safe(highlight.highlight(text, { language, ignoreIllegals: true }).value));
  }
}

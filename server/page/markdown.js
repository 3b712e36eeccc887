// A little of Markdown as elements. Text becomes text nodes, and nothing a model writes is ever markup.

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|\*(\S(?:[^*]*?\S)?)\*/s;

// Blocks in order; only the last one may still change when text is added.
export function parse(text) {
  const blocks = [];
  let open = null;
  let fence = null;
  const add = (block) => {
    blocks.push(block);
    open = block;
  };
  for (const line of text.split("\n")) {
    if (fence) {
      const close = FENCE.exec(line);
      if (close && close[1].startsWith(fence) && !close[2]) fence = open = null;
      else open.lines.push(line);
      continue;
    }
    const fenced = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    if (fenced) {
      fence = fenced[1];
      add({ kind: "code", language: fenced[2], lines: [] });
    } else if (heading) {
      add({ kind: "heading", level: heading[1].length, lines: [heading[2]] });
      open = null;
    } else if (item) {
      const ordered = item[1] !== undefined;
      if (open?.kind !== "list" || open.ordered !== ordered) {
        add({ kind: "list", ordered, start: Number(item[1] ?? 1), lines: [] });
      }
      open.lines.push(item[2]);
    } else if (!line.trim()) {
      open = open?.kind === "list" ? open : null;
    } else if (open?.kind === "list" && /^\s/.test(line)) {
      open.lines[open.lines.length - 1] += ` ${line.trim()}`;
    } else if (open?.kind === "paragraph") {
      open.lines.push(line);
    } else {
      add({ kind: "paragraph", lines: [line] });
    }
  }
  return blocks;
}

function inline(parent, text) {
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    parent.append(rest.slice(0, found.index));
    const [kind, inner] = found[1]
      ? ["code", found[2]]
      : found[3]
        ? ["strong", found[3]]
        : ["em", found[4]];
    const element = document.createElement(kind);
    if (kind === "code") element.textContent = inner;
    else inline(element, inner);
    parent.append(element);
    rest = rest.slice(found.index + found[0].length);
  }
  parent.append(rest);
}

function element(block) {
  if (block.kind === "code") {
    const pre = document.createElement("pre");
    const code = document.createElement("code");
    pre.tabIndex = 0;
    code.textContent = block.lines.join("\n");
    if (block.language) pre.dataset.language = block.language;
    pre.append(code);
    return pre;
  }
  if (block.kind === "list") {
    const list = document.createElement(block.ordered ? "ol" : "ul");
    if (block.ordered) list.start = block.start;
    for (const line of block.lines) {
      const item = document.createElement("li");
      inline(item, line);
      list.append(item);
    }
    return list;
  }
  const made = document.createElement(block.kind === "heading" ? "h4" : "p");
  inline(made, block.lines.join("\n"));
  return made;
}

// Shows text in an element; blocks that stay the same keep their elements, so that nothing flickers.
export class Markdown {
  #target;
  #shown = [];

  constructor(target) {
    this.#target = target;
  }

  show(text) {
    const blocks = parse(text).map((block) => [JSON.stringify(block), block]);
    let same = 0;
    while (same < blocks.length && this.#shown[same]?.[0] === blocks[same][0]) same += 1;
    for (const [, old] of this.#shown.splice(same)) old.remove();
    for (const [signature, block] of blocks.slice(same)) {
      const made = element(block);
      this.#target.append(made);
      this.#shown.push([signature, made]);
    }
  }
}

// How a block looks: by shape what it is for, by colour who has it.

import { hue } from "./format.js";

export const SHAPES_FROM_PX = 7;

export const LEGEND = [
  ["o", "being written"],
  ["s", "sealed"],
  ["shared", "shared by several"],
  ["c", "cached"],
  ["q", "quarantined"],
  ["r", "going back"],
  ["d", "free, holds memory"],
  ["f", "free"],
];

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  const lightness = of("owner-lightness");
  const chroma = of("owner-chroma");
  return {
    owner: (id, alpha = 1) => `oklch(${lightness} ${chroma} ${hue(id)} / ${alpha})`,
    free: of("cell-free"),
    dirty: of("cell-dirty"),
    line: of("cell-line"),
    cached: of("cell-cached"),
    mark: of("cell-mark"),
    quarantined: of("cell-quarantined"),
    notch: of("surface"),
    text: of("muted"),
  };
}

// Shapes of one kind are one path: a pool of many blocks is a few hundred strokes of the brush.
export class Brush {
  #paths = new Map();

  path(style, kind = "fill", width = 1) {
    const name = `${kind} ${width} ${style}`;
    let found = this.#paths.get(name);
    if (!found) {
      found = { kind, style, width, path: new Path2D() };
      this.#paths.set(name, found);
    }
    return found.path;
  }

  paint(context) {
    for (const { kind, style, width, path } of this.#paths.values()) {
      if (kind === "fill") {
        context.fillStyle = style;
        context.fill(path);
      } else {
        context.strokeStyle = style;
        context.lineWidth = width;
        context.stroke(path);
      }
    }
  }
}

// x, y, size: of the cell without its gap. Marks go on a brush of their own, painted later.
export function drawBlock(under, over, look, { state, owner, shared, faded }, x, y, size) {
  const roomy = size >= SHAPES_FROM_PX;
  const alpha = faded ? 0.18 : 1;
  const line = roomy ? 1.4 : 1;
  if (state === "s") {
    under.path(look.owner(owner, alpha)).rect(x, y, size, size);
  } else if (state === "o") {
    under.path(look.owner(owner, alpha * 0.28)).rect(x, y, size, size);
    const border = roomy ? 2 : 1;
    const inset = border / 2;
    over
      .path(look.owner(owner, alpha), "stroke", border)
      .rect(x + inset, y + inset, size - border, size - border);
  } else if (state === "c") {
    under.path(look.cached).rect(x, y, size, size);
    const mark = over.path(look.mark, "stroke", line);
    mark.moveTo(x, y + size);
    mark.lineTo(x + size, y);
  } else if (state === "q") {
    under.path(look.quarantined).rect(x, y, size, size);
    const mark = over.path(look.mark, "stroke", line);
    const inset = roomy ? size * 0.25 : 0;
    mark.moveTo(x + inset, y + inset);
    mark.lineTo(x + size - inset, y + size - inset);
    mark.moveTo(x + size - inset, y + inset);
    mark.lineTo(x + inset, y + size - inset);
  } else if (state === "r") {
    under.path(look.free).rect(x, y, size, size);
    const mark = over.path(look.mark, "stroke", line);
    mark.moveTo(x + size * 0.2, y + size * 0.6);
    mark.lineTo(x + size * 0.5, y + size * 0.25);
    mark.lineTo(x + size * 0.8, y + size * 0.6);
  } else if (state === "d") {
    under.path(look.dirty).rect(x, y, size, size);
    const dot = Math.max(1, Math.round(size / 5));
    over.path(look.mark).rect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
  } else {
    under.path(look.free).rect(x, y, size, size);
  }
  if (shared) {
    const notch = over.path(look.notch);
    if (roomy) {
      const side = Math.round(size * 0.55);
      notch.moveTo(x + size - side, y);
      notch.lineTo(x + size, y);
      notch.lineTo(x + size, y + side);
      notch.closePath();
    } else {
      notch.rect(x + Math.floor(size / 2), y, 1, size);
    }
  }
}

export function sharp(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const wide = Math.round(width * ratio);
  const high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// A small picture for the legend, by the same brush as the map.
export function drawSample(canvas, kind) {
  const context = sharp(canvas, 14, 14);
  const under = new Brush();
  const over = new Brush();
  const shared = kind === "shared";
  const what = { state: shared ? "s" : kind, owner: 1, shared, faded: false };
  // No sequence's own colour.
  const lightness = getComputedStyle(document.documentElement).getPropertyValue("--owner-lightness");
  const look = { ...colours(), owner: (_, alpha = 1) => `oklch(${lightness} 0 0 / ${alpha})` };
  drawBlock(under, over, look, what, 0, 0, 14);
  under.paint(context);
  over.paint(context);
}

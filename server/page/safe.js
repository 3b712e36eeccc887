// HTML that libraries make of a model's text, as elements. What is not listed here does not pass: the
// text may come from anywhere, and so may conversations that are kept or imported.

import DOMPurify from "./vendor/dompurify-3.4.18/purify.js";

export const ADDRESS = /^(?:https?:\/\/|mailto:)/i;
const CLASS = /^(?:language-[\w+#.-]{1,40}|hljs-[\w-]{1,40}|level-[1-6]|task|(?:left|center|right))$/;
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

export function safe(html) {
  return DOMPurify.sanitize(html, RULES);
}

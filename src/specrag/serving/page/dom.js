// Elements and numbers. Text enters the page as text nodes only: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; a child that is a string becomes a text node, null is left out. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in a drawing. */
export function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

/** "1 token", "1,200 tokens". */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Three digits that mean something: 0.084, 1.25, 84.2, 312. */
export function figure(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 100) return count(value);
  if (size >= 10) return value.toFixed(1);
  return value.toFixed(size >= 0.1 || size === 0 ? 2 : 3);
}

export const seconds = (value) => (Number.isFinite(value) ? `${figure(value)} s` : "–");

export const percent = (share) => (Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–");

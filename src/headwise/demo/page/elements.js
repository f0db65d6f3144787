// Making elements, writing numbers, and the one small label that follows the pointer or the keys.

export const at = (id) => document.getElementById(id);

/** An element with properties, then children: strings become text, so that nothing is ever read as markup. */
export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** The same for SVG, with attributes. */
export function draw(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const whole = (number) => Math.round(number).toLocaleString("en");

/** 0.00031 as 3.1 × 10⁻⁴, with spaces that do not break. */
export function small(number) {
  if (number === 0 || !Number.isFinite(number)) return String(number);
  const [digits, power] = number.toExponential(1).split("e");
  return `${digits}\u00a0×\u00a010${superscript(String(Number(power)))}`;
}

/** A weight in percent; one that is there does not read as none. */
export function percent(weight) {
  return weight > 0 && weight < 0.00005 ? "<\u00a00.01\u00a0%" : `${(100 * weight).toFixed(2)}\u00a0%`;
}

const superscript = (digits) => [...digits].map((d) => (d === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[d])).join("");

let whenTipGoes = () => {};

/** Show the label beside a point of the window, inside of it. Whatever hides it again calls gone first. */
export function showTip(x, y, content, gone = () => {}) {
  const tip = at("tip");
  whenTipGoes = gone;
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const room = document.documentElement.clientWidth;
  const left = Math.min(Math.max(8, x + 14), Math.max(8, room - width - 8));
  const above = y - height - 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : y + 22}px`;
}

export function hideTip() {
  whenTipGoes();
  whenTipGoes = () => {};
  at("tip").hidden = true;
}

/** Hide the label when the pointer leaves the element or the keys do. A finger leaves when it is lifted, and the label
 * is to be read then: it stays until the next touch elsewhere, or until the page moves beneath it. */
export function hideTipOnLeaving(element) {
  element.addEventListener("blur", hideTip);
  element.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") return hideTip();
    document.addEventListener("pointerdown", ({ target }) => element.contains(target) || hideTip(), { once: true });
    document.addEventListener("scroll", hideTip, { once: true });
  });
}

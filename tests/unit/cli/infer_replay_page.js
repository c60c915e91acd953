// Runs the script of a replay page in a document of a few lines, and prints what it shows as JSON.
"use strict";
const fs = require("fs");
const vm = require("vm");

class Element {
  constructor() {
    const set = new Set();
    const toggle = (name, on) => (on ? set.add(name) : set.delete(name));
    this.classList = { add: name => set.add(name), remove: name => set.delete(name), toggle };
    Object.assign(this, { children: [], dataset: {}, listeners: {}, style: {}, text: "", isConnected: true, offsetHeight: 9, isNow: () => set.has("now") });
  }
  setAttribute(name, value) { if (name === "data-place") this.dataset.place = String(value); }
  set textContent(text) { this.text = text; }
  get textContent() { return this.text; }
  append(...children) {
    for (const child of children) child.parent = this;
    this.children.push(...children);
  }
  before(...elements) { this.beside = elements; }
  replaceChildren(...children) { this.children = children; }
  remove() { this.parent.children = this.parent.children.filter(child => child !== this); }
  addEventListener(name, act) { this.listeners[name] = act; }
  closest(selector) { return selector.includes(".canvas") && "place" in this.dataset ? this : null; }
  getClientRects() { return [{ left: 0, top: 0, bottom: 10 }]; }
  querySelector(selector) { return this.parts[selector][0]; }
  querySelectorAll(selector) { return this.parts[selector]; }
}

const [, json, script] = fs.readFileSync(process.argv[2], "utf8").match(/<script type="application\/json"[^>]*>([^<]*)<\/script>\s*<script>([^]*?)<\/script>/);
const requests = JSON.parse(json).requests;
const canvases = requests.map(() => new Element());
const bars = requests.map(request => request.frames.map(() => new Element()));
const sections = requests.map((_, index) => Object.assign(new Element(), { parts: { ".canvas": [canvases[index]], ".bar": bars[index] } }));
const tabs = requests.length > 1 ? requests.map(() => new Element()) : [];
const tip = new Element();
const timers = [];
const document = Object.assign(new Element(), {
  getElementById: id => (id === "data" ? { textContent: json } : tip),
  querySelectorAll: selector => (selector === ".request" ? sections : tabs),
  querySelector: () => null,
  createElement: () => new Element(),
});
const window = Object.assign(new Element(), {
  matchMedia: () => ({ matches: false }), innerWidth: 400, innerHeight: 800,
  setTimeout: act => timers.push(act), clearTimeout: () => { timers.length = 0; },
});
vm.runInNewContext(script, { document, window, TextDecoder, Uint8Array, Element });

const shown = index => canvases[index].children.map(span => [span.className, span.text]);
const press = key => document.listeners.keydown({ key, target: new Element(), preventDefault() {} });
const frames = [shown(0)];
while (timers.length) { timers.shift()(); frames.push(shown(0)); }
press("ArrowLeft");
const back = shown(0);
const state = canvases[0].beside[1].text;
const now = bars[0].findIndex(bar => bar.isNow());
press("Home");
document.listeners.click({ target: canvases[0].children.at(-1) });
const mask = tip.children.map(child => child.text || child);
press("End");
document.listeners.click({ target: canvases[0].children.at(-1) });
const token = tip.children.map(child => child.text || child);
window.listeners.beforeprint();
const last = shown(requests.length - 1);
console.log(JSON.stringify({ frames, back, state, now, mask, token, last }));

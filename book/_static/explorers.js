// Figures that move. A page holds <figure class="explorer explorer-NAME"> with a picture and a caption
// (book/_ext/explorers.py). Here the picture gives way to native controls, a drawing in SVG, and a line that says in
// words what the drawing shows. An explorer is a function: it makes its controls once and returns the function
// that draws, which runs at each change of a control or of the width. Colors are variables of book.css.

"use strict";
const attnlibExplorers = (() => {
  // --- elements ------------------------------------------------------------------------------------------------

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  }

  const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  const BLUE = "var(--blue)", ORANGE = "var(--orange)", GREEN = "var(--green)", RED = "var(--red)";
  const TEXT = "var(--pst-color-text-base)", MUTED = "var(--pst-color-text-muted)", RULE = "var(--rule)";

  // of words that begin at a place, or end there
  const fromLeft = color => ({ fill: color, "text-anchor": "start" });
  const fromRight = color => ({ fill: color, "text-anchor": "end" });
  const signed = x => String(x).replace("-", "−");
  const ticks = numbers => numbers.map(v => [v, signed(v)]);
  const range = (count, f = i => i) => Array.from({ length: count }, (_, i) => f(i));
  const sum = numbers => numbers.reduce((a, b) => a + b, 0);

  // A number in few characters: 0.042, 1.26, 384, 1e−7.
  function short(x) {
    const size = Math.abs(x);
    if (size >= 100 || Number.isInteger(x)) return Math.round(x).toString().replace("-", "−");
    if (size < 0.001) return x.toExponential(0).replace("-", "−");
    return (size < 0.1 ? x.toFixed(3) : x.toFixed(2)).replace("-", "−");
  }

  // --- a stage: controls, panels, words ------------------------------------------------------------------------

  let count = 0; // of labelled elements, for their ids

  class Stage {
    constructor(figure) {
      this.controls = html("div", { class: "controls" });
      this.panels = html("div", { class: "panels" });
      this.drawings = [];
      this.words = html("p", { class: "readout", "aria-live": "polite" });
      this.element = html("div", { class: "stage" }, this.controls, this.panels, this.words);
      figure.querySelector("img").after(this.element); // on paper the picture shows
    }

    run(draw) {
      let drawn = "";
      this.update = draw;
      const observer = new ResizeObserver(() => { // a width is 0 until the style sheets have come
        const widths = this.drawings.map(panel => panel.width);
        if (widths.every(Boolean) && widths.join() !== drawn) draw();
        drawn = widths.join();
      });
      for (const panel of this.drawings) observer.observe(panel.element);
    }

    control(label, input, ...after) {
      input.id = `explorer-input-${++count}`;
      const name = html("label", { for: input.id }, label);
      this.controls.append(html("div", { class: "control" }, name, input, ...after));
    }

    // A control is an object with `value`; `text` says how a number is shown.
    slider(label, { min, max, value, step = 1, text = String }) {
      const shown = html("span", { class: "value", "aria-hidden": "true" });
      const input = html("input", { type: "range", min, max, step, value });
      const show = () => {
        shown.textContent = text(Number(input.value));
        input.setAttribute("aria-valuetext", shown.textContent);
      };
      input.addEventListener("input", () => { show(); this.update(); });
      this.control(label, input, shown);
      show();
      return {
        input,
        get value() { return Number(input.value); },
        set value(x) { input.value = x; show(); },
        limit(low, high) { fill(input, { min: low, max: high }, []); show(); },
      };
    }

    choice(label, options, value = options[0][0]) {
      const entries = options.map(([key, name]) => html("option", { value: key, selected: key === value }, name));
      const input = html("select", { onchange: () => this.update() }, ...entries);
      this.control(label, input);
      return input;
    }

    check(label, value = false) {
      const input = html("input", { type: "checkbox", checked: value, onchange: () => this.update() });
      this.controls.append(html("label", { class: "control check" }, input, label));
      return { get value() { return input.checked; } };
    }

    // A row of words, one of which is chosen; `set` puts others there.
    tokens(label) {
      const group = html("fieldset", { class: "words" }), name = `explorer-words-${++count}`;
      this.controls.append(group);
      let chosen = 0;
      return {
        get value() { return chosen; },
        set: (words, value) => {
          chosen = value;
          const choose = i => { chosen = i; this.update(); };
          const entries = words.map((word, i) => html("label", { class: "control word" },
            html("input", { type: "radio", name, checked: i === value, onchange: () => choose(i) }), word));
          group.replaceChildren(html("legend", {}, label), ...entries);
        },
      };
    }

    button(label, action) {
      const press = () => { action(); this.update(); };
      this.controls.append(html("button", { type: "button", class: "control", onclick: press }, label));
    }

    panel(width = 300, grow = 1) {
      const panel = new Panel(width, grow);
      this.panels.append(panel.element);
      this.drawings.push(panel);
      return panel;
    }

    say(words) {
      if (this.words.textContent !== words) this.words.textContent = words;
    }
  }

  // A drawing as wide as there is room, so that letters have one size on every screen.
  class Panel {
    constructor(width, grow) {
      this.element = svg("svg", { class: "panel", role: "img", style: `flex: ${grow} 1 ${width}px` });
    }

    get width() {
      return this.element.clientWidth;
    }

    clear(height, label) { // to a screen reader the drawing is one picture, and not its hundred parts
      this.drawing = svg("g", { "aria-hidden": "true" });
      this.element.replaceChildren(this.drawing);
      fill(this.element, { viewBox: `0 0 ${this.width} ${height}`, height, "aria-label": label }, []);
    }

    add(tag, attributes, ...children) {
      const element = svg(tag, attributes, ...children);
      this.drawing.append(element);
      return element;
    }

    text(x, y, words, attributes = {}) {
      return this.add("text", { x, y, "text-anchor": "middle", fill: TEXT, ...attributes }, words);
    }

    rect(x, y, width, height, attributes) {
      return this.add("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), ...attributes });
    }

    line(points, attributes) {
      const d = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      return this.add("path", { d, fill: "none", "stroke-width": 2, ...attributes });
    }

    dot(x, y, attributes) {
      return this.add("circle", { cx: x, cy: y, r: 5, stroke: "var(--paper)", "stroke-width": 1.5, ...attributes });
    }

    arrow(x0, y0, x1, y1, color) {
      const angle = Math.atan2(y1 - y0, x1 - x0);
      const side = turn => [x1 - 7 * Math.cos(angle + turn), y1 - 7 * Math.sin(angle + turn)];
      this.line([[x0, y0], [x1, y1]], { stroke: color });
      this.line([side(0.5), [x1, y1], side(-0.5)], { stroke: color });
    }

    // Axes in a box {left, right, top, bottom}; returns functions from numbers to places.
    axes(box, x, y) {
      const place = (axis, low, high) => {
        const f = axis.log ? Math.log : v => v;
        const [a, b] = axis.range.map(f);
        return v => low + ((f(v) - a) / (b - a)) * (high - low);
      };
      const X = place(x, box.left, box.right), Y = place(y, box.bottom, box.top);
      for (const [v, words] of x.ticks) {
        this.line([[X(v), box.bottom], [X(v), box.bottom + 4]], { stroke: MUTED, "stroke-width": 1 });
        this.text(X(v), box.bottom + 17, words, { fill: MUTED });
      }
      for (const [v, words] of y.ticks) {
        this.line([[box.left, Y(v)], [box.right, Y(v)]], { stroke: RULE, "stroke-width": 1 });
        this.text(box.left - 6, Y(v) + 4, words, fromRight(MUTED));
      }
      this.line([[box.left, box.bottom], [box.right, box.bottom]], { stroke: MUTED, "stroke-width": 1 });
      this.text((box.left + box.right) / 2, box.bottom + 34, x.label, { fill: MUTED });
      this.text(box.left - 30, box.top - 10, y.label, fromLeft(MUTED));
      return [X, Y];
    }
  }

  // --- the formulas: those of the library, which a test compares -----------------------------------------------

  function softmax(z) {
    const top = Math.max(...z), e = z.map(x => Math.exp(x - top)), total = sum(e);
    return e.map(x => x / total);
  }

  // ω_i = base^(-2i/d), as attnlib.position.position_angles
  const frequencies = (dim, base = 10000) => range(dim / 2, i => base ** ((-2 * i) / dim));

  // sin and cos in turn, as attnlib.position.sinusoidal_encoding
  const sinusoids = (position, dim, base) =>
    frequencies(dim, base).flatMap(w => [Math.sin(w * position), Math.cos(w * position)]);

  // Normal numbers that are the same in every browser (mulberry32, Box and Muller).
  function normals(seed, length) {
    const uniform = () => {
      seed = (seed + 0x6d2b79f5) | 0;
      let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
    };
    return range(length, () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
  }

  // --- softmax against the width -------------------------------------------------------------------------------

  const KEYS = 12;

  function saturation(stage) {
    const width = stage.slider("width d", { min: 0, max: 10, value: 6, text: e => String(2 ** e) });
    const scaled = stage.check("divide by √d");
    let seed = 4;
    stage.button("other keys", () => { seed += 1; });
    const bars = stage.panel(330, 1.2), curve = stage.panel(260);
    const factor = (d, divide) => (divide ? 1 : Math.sqrt(d)); // of logits with standard deviation 1
    const slope = weights => Math.max(...weights.map(a => a * (1 - a))); // largest entry of diag(a) - a aᵀ

    return () => {
      const d = 2 ** width.value, sample = normals(seed, KEYS);
      const logits = sample.map(g => g * factor(d, scaled.value)), weights = softmax(logits);
      const spread = factor(d, scaled.value), most = Math.max(...weights);
      drawBars(bars, logits, weights);
      drawSlopes(curve, d, scaled.value, divide =>
        range(11, e => [2 ** e, slope(softmax(sample.map(g => g * factor(2 ** e, divide))))]));
      stage.say(`Width ${d}: the logits have standard deviation ${short(spread)}. The largest weight is ` +
        `${short(most)}, and no weight changes faster than ${short(slope(weights))} with any logit.`);
    };
  }

  function drawBars(panel, logits, weights) {
    panel.clear(330, `Logits of ${KEYS} keys: ${logits.map(short).join(", ")}. Below their softmax: ` +
      weights.map(short).join(", ") + ".");
    const step = (panel.width - 8) / KEYS, middle = 95, base = 300, best = Math.max(...weights);
    panel.text(4, 14, "logits q·k", fromLeft(MUTED));
    panel.text(4, 192, "weights, their softmax", fromLeft(MUTED));
    logits.forEach((z, i) => {
      const x = 4 + i * step, high = Math.min(65, Math.abs(z) * 3), cut = Math.abs(z) * 3 > 65;
      const color = weights[i] === best ? ORANGE : BLUE, tall = 90 * weights[i];
      panel.rect(x + 2, z > 0 ? middle - high : middle, step - 4, high, { fill: color, opacity: cut ? 0.55 : 1 });
      panel.text(x + step / 2, z > 0 ? middle - high - 4 : middle + high + 13, short(Math.round(z)));
      panel.rect(x + 2, base - tall, step - 4, tall, { fill: color });
      if (weights[i] >= 0.005) panel.text(x + step / 2, base - tall - 4, weights[i].toFixed(2));
    });
    for (const y of [middle, base])
      panel.line([[4, y], [panel.width - 4, y]], { stroke: MUTED, "stroke-width": 1 });
  }

  function drawSlopes(panel, d, divided, curve) {
    panel.clear(320, "The largest derivative of a weight by a logit against the width, with and without the " +
      `division; the width ${d} is marked.`);
    const box = { left: 46, right: panel.width - 10, top: 34, bottom: 276 };
    const [X, Y] = panel.axes(box,
      { range: [1, 1024], log: true, label: "width d", ticks: ticks([1, 4, 16, 64, 256, 1024]) },
      { range: [1e-8, 1], log: true, label: "largest ∂a/∂z",
        ticks: [[1, "1"], [1e-2, "0.01"], [1e-4, "10⁻⁴"], [1e-6, "10⁻⁶"], [1e-8, "10⁻⁸"]] });
    for (const [divide, name, color] of [[false, "q·k", RED], [true, "q·k / √d", GREEN]]) {
      const points = curve(divide).map(([v, slope]) => [X(v), Y(Math.max(slope, 1e-8))]);
      panel.line(points, { stroke: color, "stroke-dasharray": divide ? "6 4" : "none" });
      if (divide === divided) panel.dot(...points[Math.log2(d)], { fill: color });
      const [x, y] = points[8];
      if (divide) panel.text(x, y - 9, name, { fill: color });
      else panel.text(x, Math.min(y, box.bottom - 30) + 20, name, fromRight(color));
    }
  }

  // --- sinusoids: hands that turn ------------------------------------------------------------------------------

  const PLACES = 100;
  const wavelength = w => (w > 0.1 ? (2 * Math.PI / w).toFixed(1) : Math.round(2 * Math.PI / w).toLocaleString("en"));

  function sinusoidalCode(stage) {
    const position = stage.slider("position", { min: 0, max: PLACES - 50, value: 12 });
    const distance = stage.slider("distance k", { min: 0, max: 50, value: 5 });
    const width = stage.choice("width d", [[8, "8"], [16, "16"], [32, "32"], [64, "64"]], 16);
    const base = stage.choice("base", [[100, "100"], [1000, "1,000"], [10000, "10,000"]], 10000);
    const wheels = stage.panel(360, 1.5), curve = stage.panel(260);

    return () => {
      const p = position.value, k = distance.value, d = Number(width.value);
      const speeds = frequencies(d, Number(base.value));
      const kernel = delta => sum(speeds.map(w => Math.cos(w * delta)));
      drawWheels(wheels, speeds, p, k);
      drawKernel(curve, kernel, d / 2, k);
      stage.say(`Positions ${p} and ${p + k}: wheel 1 turns by ${short(speeds[0] * k)} radians from one to the other, ` +
        `wheel ${d / 2} by ${short(speeds[d / 2 - 1] * k)}. The inner product of the two codes is ` +
        `${kernel(k).toFixed(2)} of ${d / 2}.`);
    };
  }

  function drawWheels(panel, speeds, p, k) {
    const rows = Math.min(8, speeds.length), every = speeds.length / rows, high = 42, r = 16;
    const chosen = range(rows, i => Math.round(i * every));
    panel.clear(rows * high + 30, `${rows} wheels. Their wavelengths are ` +
      chosen.map(i => wavelength(speeds[i])).join(", ") + `. Each has a hand for position ${p} and one for ` +
      `position ${p + k}; beside it is its sine over the positions 0 to ${PLACES}.`);
    const left = 112, right = panel.width - 6, X = pos => left + (pos / PLACES) * (right - left);
    for (const [pos, color] of [[p, BLUE], [p + k, ORANGE]])
      panel.line([[X(pos), 4], [X(pos), rows * high]], { stroke: color, "stroke-width": 1 });
    chosen.forEach((i, row) => {
      const y = high * (row + 0.5), w = speeds[i], wave = pos => y - 14 * Math.sin(w * pos);
      const hand = pos => [80 + r * Math.cos(w * pos), y - r * Math.sin(w * pos)];
      panel.text(52, y - 2, `wheel ${i + 1}`, { "text-anchor": "end" });
      panel.text(52, y + 12, `λ ${wavelength(w)}`, fromRight(MUTED));
      panel.add("circle", { cx: 80, cy: y, r, fill: "none", stroke: MUTED });
      panel.line(range(4 * PLACES + 1, n => [X(n / 4), wave(n / 4)]), { stroke: MUTED, "stroke-width": 1.25 });
      for (const [pos, color] of [[p + k, ORANGE], [p, BLUE]]) {
        panel.line([[80, y], hand(pos)], { stroke: color, "stroke-width": 2.5 });
        panel.dot(X(pos), wave(pos), { fill: color, r: 4 });
      }
    });
    for (const pos of [0, 25, 50, 75, 100])
      panel.text(X(pos), rows * high + 16, String(pos), { fill: MUTED, "text-anchor": pos === 100 ? "end" : "middle" });
  }

  function drawKernel(panel, kernel, most, k) {
    panel.clear(280, `The inner product of two codes against their distance; at distance ${k} it is ` +
      `${kernel(k).toFixed(2)} of ${most}.`);
    const box = { left: 34, right: panel.width - 10, top: 40, bottom: 236 };
    const [X, Y] = panel.axes(box,
      { range: [0, 50], label: "distance k", ticks: ticks([0, 10, 20, 30, 40, 50]) },
      { range: [-most / 4, most], label: "inner product of the codes", ticks: ticks([0, most / 2, most]) });
    panel.line(range(201, n => [X(n / 4), Y(kernel(n / 4))]), { stroke: GREEN });
    panel.dot(X(k), Y(kernel(k)), { fill: GREEN });
  }

  // --- rotary: queries and keys that turn ----------------------------------------------------------------------

  // The pairs (x_0, x_1), (x_2, x_3), ... turned by position · ω_i, as attnlib.position.apply_rotary
  const rotary = (x, position, base) => frequencies(x.length, base).flatMap((w, i) => {
    const [a, b] = [x[2 * i], x[2 * i + 1]], cos = Math.cos(w * position), sin = Math.sin(w * position);
    return [a * cos - b * sin, a * sin + b * cos];
  });
  const dot = (x, y) => sum(x.map((a, i) => a * y[i]));

  const QUERY = [0.9, 0.5, -0.6, 0.9, 1.0, -0.3, 0.4, 0.9], SLOWEST = 100; // four pairs, wavelengths 6 to 199
  const ROTARY_KEYS = {
    same: ["the query itself", QUERY],
    back: ["the query, turned back by 12", rotary(QUERY, -12, SLOWEST)],
    other: ["another vector", [0.2, -0.9, 0.8, 0.5, -0.7, 0.6, 0.9, -0.2]],
  };

  function rotaryLogits(stage) {
    const position = stage.slider("query at m", { min: 0, max: 100, value: 10 });
    const offset = stage.slider("key at m +", { min: -40, max: 40, value: 8, text: signed });
    const kind = stage.choice("key", Object.entries(ROTARY_KEYS).map(([key, [name]]) => [key, name]));
    const hands = stage.panel(250), curve = stage.panel(330, 1.3);

    return () => {
      const m = position.value, delta = offset.value, key = ROTARY_KEYS[kind.value][1];
      const turned = d => dot(rotary(QUERY, m, SLOWEST), rotary(key, m + d, SLOWEST));
      const plus = (x, pos) => sinusoids(pos, x.length, SLOWEST).map((p, i) => p + x[i]);
      const added = d => dot(plus(QUERY, m), plus(key, m + d));
      drawPairs(hands, rotary(QUERY, m, SLOWEST), rotary(key, m + delta, SLOWEST));
      drawLogits(curve, turned, added, delta);
      stage.say(`Query at ${m}, key at ${m + delta}: the rotary logit is ${short(turned(delta))}. If the codes were ` +
        `added instead of turning the vectors, it would be ${short(added(delta))}.`);
    };
  }

  function drawPairs(panel, query, key) {
    const cell = Math.min(130, panel.width / 2), r = cell / 2 - 14, left = panel.width / 2 - cell;
    panel.clear(2 * cell + 22, "Four dials, one for each pair of entries, with an arrow for the query and one for the key.");
    for (const i of range(4)) {
      const x = left + cell * (0.5 + (i % 2)), y = cell * (0.5 + Math.floor(i / 2));
      panel.add("circle", { cx: x, cy: y, r, fill: "none", stroke: RULE });
      panel.text(x - r, y - r + 6, String(i + 1), { fill: MUTED });
      for (const [vector, color] of [[key, ORANGE], [query, BLUE]])
        panel.arrow(x, y, x + (r / 1.15) * vector[2 * i], y - (r / 1.15) * vector[2 * i + 1], color);
    }
    panel.text(panel.width / 2 - 34, 2 * cell + 14, "query", { fill: BLUE });
    panel.text(panel.width / 2 + 34, 2 * cell + 14, "key", { fill: ORANGE });
  }

  function drawLogits(panel, turned, added, delta) {
    panel.clear(285, `The logit against the distance from query to key: at distance ${delta} ${short(turned(delta))} for ` +
      `rotary, ${short(added(delta))} for added codes.`);
    const box = { left: 34, right: panel.width - 10, top: 40, bottom: 240 };
    const [X, Y] = panel.axes(box,
      { range: [-40, 40], label: "distance from query to key", ticks: ticks([-40, -20, 0, 20, 40]) },
      { range: [-8, 14], label: "logit", ticks: ticks([-5, 0, 5, 10]) });
    for (const [f, color, dash] of [[added, RED, "5 4"], [turned, GREEN, "none"]]) {
      panel.line(range(161, n => [X(n / 2 - 40), Y(f(n / 2 - 40))]), { stroke: color, "stroke-dasharray": dash });
      panel.dot(X(delta), Y(f(delta)), { fill: color });
    }
    panel.text(box.right, box.top - 10, "rotary", fromRight(GREEN));
    panel.text(box.right - 52, box.top - 10, "codes added (dashed)", fromRight(RED));
  }

  // --- the shift mask of Swin ----------------------------------------------------------------------------------

  // {window, shift, padded}, each [rows, columns], as attnlib.swin.window_layout
  function windowLayout(size, windowSize, shiftSize) {
    const window = size.map((n, i) => Math.min(n, windowSize[i]));
    const padded = size.map((n, i) => Math.ceil(n / window[i]) * window[i]);
    const shift = shiftSize.map((s, i) => (padded[i] > window[i] ? s : 0));
    return { window, shift, padded };
  }

  // Of a place on the rolled map: its window, its number in it, and which seams it was carried over.
  function windowed({ window, shift, padded }, y, x) {
    const inRow = padded[1] / window[1], over = [y, x].map((v, i) => v >= padded[i] - shift[i]);
    return {
      window: Math.floor(y / window[0]) * inRow + Math.floor(x / window[1]),
      token: (y % window[0]) * window[1] + (x % window[1]),
      region: 2 * over[0] + Number(over[1]),
    };
  }

  // The regions of the tokens of each window; two tokens may meet where these are equal.
  function windowRegions(layout) {
    const { window, padded } = layout, tokens = window[0] * window[1];
    const regions = range((padded[0] * padded[1]) / tokens, () => Array(tokens));
    for (const y of range(padded[0]))
      for (const x of range(padded[1])) {
        const place = windowed(layout, y, x);
        regions[place.window][place.token] = place.region;
      }
    return regions;
  }

  // (windows, N, N), as attnlib.swin.shift_mask
  const shiftMask = layout => windowRegions(layout).map(own => own.map(a => own.map(b => a === b)));

  const REGIONS = [BLUE, ORANGE, GREEN, RED];

  function shiftExplorer(stage) {
    const rows = stage.slider("rows", { min: 2, max: 14, value: 8 });
    const columns = stage.slider("columns", { min: 2, max: 14, value: 8 });
    const size = stage.slider("window M", { min: 2, max: 7, value: 4 });
    const by = stage.slider("shift s", { min: 0, max: 3, value: 2 });
    const row = stage.slider("query row", { min: 1, max: 8, value: 2 });
    const column = stage.slider("query column", { min: 1, max: 8, value: 6 });
    const map = stage.panel(215), rolled = stage.panel(215), mask = stage.panel(215);
    const choose = (y, x) => { row.value = y + 1; column.value = x + 1; stage.update(); };

    return () => {
      by.limit(0, size.value - 1);
      const layout = windowLayout([rows.value, columns.value], [size.value, size.value], [by.value, by.value]);
      const { padded, shift, window } = layout;
      row.limit(1, padded[0]);
      column.limit(1, padded[1]);
      const query = [row.value - 1, column.value - 1];
      const roll = place => place.map((v, i) => (v - shift[i] + padded[i]) % padded[i]);
      const at = (y, x) => windowed(layout, ...roll([y, x])), own = at(...query);
      const meets = (y, x) => at(y, x).window === own.window && at(y, x).region === own.region;
      const tokens = { size: [rows.value, columns.value], padded, query, at, meets, choose };
      drawMap(map, "the map, moved grid", tokens, place => place, shift, window);
      drawMap(rolled, "rolled: windows fit", tokens, roll, [0, 0], window);
      drawMask(mask, windowRegions(layout)[own.window], own);
      const met = windowRegions(layout)[own.window].filter(region => region === own.region).length;
      const cells = new Set(windowRegions(layout)[own.window]).size;
      stage.say(`The query in row ${row.value}, column ${column.value} falls into a window of ${window[0] * window[1]} ` +
        `tokens and may attend to ${met} of them, those of its cell. Its window holds ${cells} ` +
        `cell${cells > 1 ? "s" : ""}` +
        (padded[0] * padded[1] > rows.value * columns.value ? "; pale tokens are padding." : "."));
    };
  }

  // A map of tokens, each drawn where `place` puts it, with the lines of a grid that begins at `start`.
  function drawMap(panel, title, { size, padded, query, at, meets, choose }, place, start, window) {
    const side = Math.min(26, (panel.width - 4) / padded[1]), left = (panel.width - side * padded[1]) / 2, top = 24;
    panel.clear(top + side * padded[0] + 6, `${title}: ${padded[0]} rows and ${padded[1]} columns of tokens, the ` +
      `query in row ${query[0] + 1}, column ${query[1] + 1}.`);
    panel.text(panel.width / 2, 14, title, { fill: MUTED });
    for (const y of range(padded[0]))
      for (const x of range(padded[1])) {
        const [py, px] = place([y, x]), outside = y >= size[0] || x >= size[1], asks = y === query[0] && x === query[1];
        const opacity = (meets(y, x) ? 0.85 : 0.22) * (outside ? 0.5 : 1);
        panel.rect(left + px * side + 1, top + py * side + 1, side - 2, side - 2, {
          fill: REGIONS[at(y, x).region], opacity, class: "press", onclick: () => choose(y, x) });
        if (asks) panel.dot(left + (px + 0.5) * side, top + (py + 0.5) * side, { fill: TEXT, r: side / 4.5 });
      }
    const lines = axis =>
      [0, padded[axis], ...range(padded[axis] + 1).filter(v => (v - start[axis]) % window[axis] === 0)];
    const border = { stroke: TEXT, "stroke-width": 1.5 };
    for (const y of lines(0))
      panel.line([[left, top + y * side], [left + padded[1] * side, top + y * side]], border);
    for (const x of lines(1))
      panel.line([[left + x * side, top], [left + x * side, top + padded[0] * side]], border);
  }

  function drawMask(panel, regions, own) {
    const n = regions.length, span = Math.min(210, panel.width - 4), side = span / n, left = (panel.width - span) / 2;
    panel.clear(24 + span + 24, `The mask of the query's window, ${n} by ${n}: a square is filled where a query, its row, ` +
      `may attend to a key, its column.`);
    panel.text(panel.width / 2, 14, `mask of its window, ${n} × ${n}`, { fill: MUTED });
    regions.forEach((a, i) => regions.forEach((b, j) => panel.rect(left + j * side, 24 + i * side, side - 0.5, side - 0.5,
      { fill: a === b ? REGIONS[a] : RULE, opacity: a === b ? (i === own.token ? 1 : 0.6) : 0.4 })));
    panel.rect(left - 1, 24 + own.token * side - 1, span + 2, side + 2, { fill: "none", stroke: TEXT, "stroke-width": 1.5 });
    panel.text(panel.width / 2, 24 + span + 18, "the query's row is framed", { fill: MUTED });
  }

  // --- a Vision Transformer: whom does a patch ask? ------------------------------------------------------------

  // Weights as tools.explorers packs them: a byte each, 255 times the square root.
  function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    return start => i => (bytes[start + i] / 255) ** 2;
  }

  const SIDE = 8, TOKENS = 1 + SIDE * SIDE, BRIGHT = 8; // patches in a row; tokens; what is drawn full, in even shares
  const strength = weight => Math.min(1, (weight * TOKENS) / BRIGHT);
  const percent = x => (x < 0.1 ? `${(100 * x).toFixed(1)}%` : `${Math.round(100 * x)}%`);

  function patchExplorer(stage, { pictures }) {
    const maps = pictures.map(picture => unpacked(picture.maps));
    const which = stage.choice("picture", pictures.map((picture, i) => [i, picture.title]), 0);
    const row = stage.slider("query row", { min: 1, max: SIDE, value: 4 });
    const column = stage.slider("query column", { min: 1, max: SIDE, value: 4 });
    const block = stage.slider("block", { min: 1, max: 6, value: 3 });
    const head = stage.slider("head", { min: 1, max: 4, value: 2 });
    const token = stage.check("the class token asks");
    const view = stage.panel(300), all = stage.panel(300);

    return () => {
      const { blocks, heads, image } = pictures[which.value];
      block.limit(1, blocks);
      const query = token.value ? 0 : 1 + SIDE * (row.value - 1) + column.value - 1;
      const weights = (l, h) => maps[which.value](((l * heads + h) * TOKENS + query) * TOKENS);
      const own = weights(block.value - 1, head.value - 1);
      const ask = i => { row.value = Math.floor(i / SIDE) + 1; column.value = (i % SIDE) + 1; stage.update(); };
      const pick = (l, h) => { block.value = l + 1; head.value = h + 1; stage.update(); };
      drawPicture(view, image, own, query, ask);
      drawHeads(all, blocks, heads, weights, query, [block.value - 1, head.value - 1], pick);
      const most = range(SIDE * SIDE).reduce((a, b) => (own(1 + b) > own(1 + a) ? b : a));
      const named = i => `the patch in row ${Math.floor(i / SIDE) + 1}, column ${i % SIDE + 1}`;
      stage.say(`Block ${block.value}, head ${head.value}: ${query ? named(query - 1) : "the class token"} gives most to ` +
        `${named(most)}: ${percent(own(1 + most))} of its weight, ` +
        `${(own(1 + most) * TOKENS).toFixed(1)} times an even share. The class token gets ${percent(own(0))}.`);
    };
  }

  function drawPicture(panel, image, weights, query, ask) {
    const span = Math.min(300, panel.width), side = span / SIDE, left = (panel.width - span) / 2;
    panel.clear(span + 4, "The picture, dark but for the patches to which the query attends.");
    panel.add("image", { href: image, x: left, y: 2, width: span, height: span });
    for (const i of range(SIDE * SIDE))
      panel.rect(left + (i % SIDE) * side, 2 + Math.floor(i / SIDE) * side, side, side, {
        fill: "#000", opacity: 0.82 * (1 - strength(weights(1 + i))), class: "press", onclick: () => ask(i) });
    if (query) {
      const [x, y] = [left + ((query - 1) % SIDE) * side, 2 + Math.floor((query - 1) / SIDE) * side];
      panel.rect(x, y, side, side, { fill: "none", stroke: "#fff", "stroke-width": 5 });
      panel.rect(x, y, side, side, { fill: "none", stroke: "#d55e00", "stroke-width": 3 });
    }
  }

  function drawHeads(panel, blocks, heads, weights, query, [block, head], pick) {
    const cell = Math.min((panel.width - 62) / heads, 64), side = (cell - 10) / SIDE, left = 62;
    panel.clear(22 + blocks * cell, `The maps of the same query in all ${heads} heads of all ${blocks} blocks; that of ` +
      `block ${block + 1}, head ${head + 1} is framed.`);
    for (const h of range(heads)) panel.text(left + (h + 0.5) * cell - 5, 13, `head ${h + 1}`, { fill: MUTED });
    for (const l of range(blocks)) {
      panel.text(left - 10, 22 + (l + 0.5) * cell, `block ${l + 1}`, fromRight(MUTED));
      for (const h of range(heads)) {
        const own = weights(l, h), x = left + h * cell, y = 20 + l * cell, chosen = l === block && h === head;
        panel.rect(x, y, SIDE * side, SIDE * side, { fill: "var(--shade)", class: "press", onclick: () => pick(l, h),
          stroke: chosen ? ORANGE : RULE, "stroke-width": chosen ? 4 : 1 });
        for (const i of range(SIDE * SIDE))
          if (strength(own(1 + i)) > 0.02)
            panel.rect(x + (i % SIDE) * side, y + Math.floor(i / SIDE) * side, side, side, {
              fill: BLUE, opacity: strength(own(1 + i)), "pointer-events": "none" });
        const [row, column] = [Math.floor((query - 1) / SIDE), (query - 1) % SIDE];
        if (query) panel.add("circle", { cx: x + (column + 0.5) * side, cy: y + (row + 0.5) * side, r: 2.5,
          fill: ORANGE, "pointer-events": "none" });
      }
    }
  }

  // --- a translator: what does each head look at? --------------------------------------------------------------

  const KINDS = [["cross", "from German to English"], ["encoder", "within English"], ["decoder", "within German"]];

  function headExplorer(stage, { layers, heads, sentences }) {
    const which = stage.choice("sentence", sentences.map(({ title }, i) => [i, title]), 0);
    const kind = stage.choice("attention", KINDS);
    const token = stage.tokens("the query: the token that is produced, or read"), table = stage.panel(600);
    let shown = "";

    return () => {
      const own = sentences[which.value], said = own.target.slice(1), read = own.target.slice(0, -1);
      const queries = kind.value === "encoder" ? own.source : said;
      const keys = kind.value === "decoder" ? read : own.source;
      if (shown !== `${which.value} ${kind.value}`) token.set(queries, Math.min(2, queries.length - 1));
      shown = `${which.value} ${kind.value}`;
      const query = token.value, row = unpacked(own[kind.value]);
      const weights = range(layers * heads, lh => range(keys.length, row((lh * queries.length + query) * keys.length)));
      drawTable(table, keys, weights, heads, queries[query]);
      const tops = weights.map(w => Math.max(...w)), sharpest = tops.indexOf(Math.max(...tops));
      const mean = keys.map((_, j) => sum(weights.map(w => w[j])) / weights.length), most = Math.max(...mean);
      const name = `${Math.floor(sharpest / heads) + 1}.${sharpest % heads + 1}`;
      const does = kind.value === "encoder" ? "reads" : "produces";
      stage.say(`While the model ${does} “${queries[query]}”, the sharpest head, ${name}, ` +
        `gives ${percent(tops[sharpest])} to “${keys[weights[sharpest].indexOf(tops[sharpest])]}”. ` +
        `On average over all heads, “${keys[mean.indexOf(most)]}” gets the most, ${percent(most)}.`);
    };
  }

  // Rows are keys, columns the heads, layer by layer.
  function drawTable(panel, keys, weights, heads, query) {
    const left = Math.min(96, panel.width * 0.24), gap = 6, count = weights.length, high = 25, top = 40;
    const wide = (panel.width - left - (count / heads - 1) * gap) / count;
    const X = lh => left + lh * wide + Math.floor(lh / heads) * gap;
    panel.clear(top + keys.length * high + 4, `The weights of ${count} heads, ${heads} in each layer, for the query ` +
      `“${query}”; rows are the keys ${keys.join(", ")}.`);
    weights.forEach((own, lh) => {
      if (lh % heads === 0) panel.text(X(lh) + (wide * heads) / 2, 13, `layer ${lh / heads + 1}`, { fill: MUTED });
      const name = wide < 24 ? `${lh % heads + 1}` : `${Math.floor(lh / heads) + 1}.${lh % heads + 1}`;
      panel.text(X(lh) + wide / 2, 31, name, { fill: MUTED });
      own.forEach((weight, j) => {
        const y = top + j * high;
        panel.rect(X(lh) + 1, y + 1, wide - 2, high - 2, { fill: "var(--shade)" });
        panel.rect(X(lh) + 1, y + 1, wide - 2, high - 2, { fill: BLUE, opacity: weight });
        if (weight >= 0.095 && wide >= 24) panel.text(X(lh) + wide / 2, y + 17, weight.toFixed(2).replace(/^0/, ""),
          weight > 0.5 ? { fill: "var(--paper)" } : {});
      });
    });
    keys.forEach((key, j) => panel.text(left - 8, top + j * high + 17, key, { "text-anchor": "end" }));
  }

  // --- operations against length and window --------------------------------------------------------------------

  // Of a block, for one of n tokens of width c, with heads of width d: its four linear layers, and three kinds of
  // attention, which are attnlib's attention, local_attention (causal) and linear_attention.
  const operations = (n, c, w, d) => ({
    layers: 24 * c * c, exact: 4 * n * c, window: 4 * 2 * w * c, linear: 4 * (d + 1) * c });

  const METHODS = [["exact", BLUE, "none"], ["window", ORANGE, "7 4"], ["linear", GREEN, "2 4"]];
  const grouped = x => Math.round(x).toLocaleString("en");

  function crossover(stage) {
    const power = { min: 0, step: 1, text: e => grouped(2 ** e) };
    const length = stage.slider("length N", { ...power, min: 5, max: 17, value: 12 });
    const width = stage.slider("width C", { ...power, min: 6, max: 13, value: 9 });
    const window = stage.slider("window w", { ...power, min: 4, max: 12, value: 7 });
    const head = stage.slider("head width d", { ...power, min: 4, max: 8, value: 6 });
    const curves = stage.panel(380, 1.6), bars = stage.panel(240);

    return () => {
      const [n, c, w, d] = [length, width, window, head].map(slider => 2 ** slider.value), cost = operations(n, c, w, d);
      const crossings = [[2 * w, "2w", ORANGE], [d + 1, "d + 1", GREEN], [6 * c, "6C", MUTED]];
      drawCosts(curves, n, m => operations(m, c, w, d), crossings);
      drawBlocks(bars, cost);
      const whole = kind => cost.layers + cost[kind];
      const share = kind => `${Math.round((100 * whole(kind)) / whole("exact"))}%`;
      stage.say(`At ${grouped(n)} tokens exact attention takes ${percent(cost.exact / whole("exact"))} of the block's operations, ` +
        `and the linear layers the rest. With a window of ${grouped(w)} in its place the block takes ${share("window")} of what it ` +
        `took, with linear attention ${share("linear")}.`);
    };
  }

  function drawCosts(panel, n, cost, crossings) {
    panel.clear(330, `Operations for a token against the length. Exact attention crosses ` +
      crossings.map(([at, name]) => `at N = ${name}, ${grouped(at)}`).join(", ") + `; the length ${grouped(n)} is marked.`);
    const box = { left: 44, right: panel.width - 12, top: 60, bottom: 284 };
    const [X, Y] = panel.axes(box,
      { range: [16, 131072], log: true, label: "length N",
        ticks: [[16, "16"], [128, "128"], [1024, "1k"], [8192, "8k"], [65536, "64k"]] },
      { range: [1e3, 1e10], log: true, label: "operations for a token",
        ticks: [[1e3, "10³"], [1e5, "10⁵"], [1e7, "10⁷"], [1e9, "10⁹"]] });
    const lengths = [16, 131072];
    panel.line(lengths.map(m => [X(m), Y(cost(m).layers)]), { stroke: MUTED });
    for (const [kind, color, dash] of METHODS)
      panel.line(lengths.map(m => [X(m), Y(cost(m)[kind])]), { stroke: color, "stroke-dasharray": dash });
    for (const [at, name, color] of crossings)
      if (at <= 131072) {
        panel.line([[X(at), Y(cost(at).exact)], [X(at), box.bottom]], { stroke: color, "stroke-width": 1 });
        panel.dot(X(at), Y(cost(at).exact), { fill: "var(--paper)", stroke: color, "stroke-width": 2 });
        panel.text(X(at), Y(cost(at).exact) - 10, name, fromRight(color));
      }
    panel.line([[X(n), box.top], [X(n), box.bottom]], { stroke: TEXT, "stroke-dasharray": "2 3", "stroke-width": 1.5 });
    for (const [kind, color] of METHODS) panel.dot(X(n), Y(cost(n)[kind]), { fill: color });
    panel.text(box.left, 16, "linear layers", fromLeft(MUTED));
    METHODS.forEach(([kind, color], i) => panel.text(box.left + [92, 142, 206][i], 16, kind, fromLeft(color)));
  }

  function drawBlocks(panel, cost) {
    const most = cost.layers + Math.max(...METHODS.map(([kind]) => cost[kind])), wide = panel.width - 12;
    panel.clear(250, "The operations of a whole block with each kind of attention: " +
      METHODS.map(([kind]) => `${kind} ${grouped(cost.layers + cost[kind])}`).join(", ") + " for a token.");
    panel.text(4, 16, "a block, for a token", fromLeft(MUTED));
    METHODS.forEach(([kind, color], i) => {
      const y = 40 + 68 * i, layers = (wide * cost.layers) / most, own = (wide * cost[kind]) / most;
      panel.text(4, y, `${kind}: ${grouped((cost.layers + cost[kind]) / 1e3)} thousand`, fromLeft(color));
      panel.rect(4, y + 8, layers, 26, { fill: MUTED, opacity: 0.55 });
      panel.rect(4 + layers, y + 8, own, 26, { fill: color });
    });
  }

  // --- beam search: a tree that grows --------------------------------------------------------------------------

  const END = "</s>";
  const chance = p => (p < 0.0005 ? "≈0" : p.toFixed(p < 0.1 ? 3 : 2));

  // The steps of a search with the text of each continuation, its parent's place, and whether it is a result.
  function grown({ steps }, beams) {
    let alive = [{ text: "", place: 0 }];
    return steps.map(step => {
      const nodes = step.map((node, place) => ({ ...node, place, parent: alive[node.beam].place,
        text: alive[node.beam].text + (node.token === END ? "" : node.token),
        ended: node.token === END && place < beams }));
      alive = nodes.filter(node => node.kept);
      return nodes;
    });
  }

  function beamExplorer(stage, { cases }) {
    const which = stage.choice("source", cases.map(({ title }, i) => [i, title]), 0);
    const beams = stage.slider("beams K", { min: 1, max: 4, value: 2 });
    const step = stage.slider("step", { min: 1, max: 4, value: 2 });
    const tree = stage.panel(700), list = stage.panel(700);

    return () => {
      const search = cases[which.value].searches[beams.value - 1], steps = grown(search, beams.value);
      step.limit(1, steps.length);
      const n = step.value, done = steps.slice(0, n).flat().filter(node => node.ended);
      const best = done.reduce((a, b) => (b.p > a.p ? b : a), { p: 0 }), kept = steps[n - 1].filter(node => node.kept);
      drawTree(tree, steps.slice(0, n), 2 * beams.value);
      drawBeams(list, kept, best, n === steps.length);
      const found = best.p ? `“${best.text}” with probability ${best.p.toFixed(3)}` : "none";
      stage.say(n === steps.length ? `Step ${n}: the search ends with ${found}, which no beam can overtake.` :
        `Step ${n} weighs ${steps[n - 1].length} continuations and keeps ${kept.map(node => `“${node.text}”`).join(", ")}. ` +
          `The best complete sentence so far: ${found}.`);
    };
  }

  function drawTree(panel, steps, rows) {
    const columns = Math.min(steps.length, Math.max(2, Math.floor(panel.width / 118))), first = steps.length - columns;
    const wide = Math.min(150, panel.width / columns), high = 30, top = 26;
    const X = column => column * wide + 16, Y = place => top + (place + 0.5) * high;
    const names = steps.slice(first).map(nodes => nodes.map(node => `${node.token} ${short(node.p)}`).join(", "));
    panel.clear(top + rows * high + 4, `The continuations of the steps ${first + 1} to ${steps.length}, the most ` +
      `probable on top: ${names.join("; then ")}.`);
    steps.slice(first).forEach((nodes, column) => {
      panel.text(X(column) + (wide - 28) / 2, 14, `step ${first + column + 1}`, { fill: MUTED });
      for (const node of nodes) {
        const stays = node.ended || node.kept, stroke = node.ended ? GREEN : node.kept ? BLUE : MUTED;
        const look = { stroke, "stroke-width": stays ? 2 : 1, "stroke-dasharray": stays ? "none" : "3 3" };
        const from = column ? [X(column - 1) + wide - 28, Y(node.parent)] : [X(0) - 14, Y(0)];
        if (column || !first)
          panel.line([from, [X(column), Y(node.place)]], look);
        panel.rect(X(column), Y(node.place) - 12, wide - 28, 24, { rx: 5, fill: "var(--paper)", ...look });
        const word = node.token === END ? "end" : node.token, cut = word.length > 9 ? `${word.slice(0, 8)}…` : word;
        panel.text(X(column) + 6, Y(node.place) + 4, cut, fromLeft(stays ? TEXT : MUTED));
        panel.text(X(column) + wide - 32, Y(node.place) + 4, chance(node.p), fromRight(MUTED));
      }
    });
  }

  function drawBeams(panel, kept, best, over) {
    panel.clear(24 + 20 * (kept.length + 1), `The beams: ${kept.map(node => node.text).join(", ")}. The best ` +
      `complete sentence: ${best.text || "none"}.`);
    const row = (i, p, text, fill) => {
      panel.text(44, 16 + 20 * i, p, fromRight(MUTED));
      panel.text(54, 16 + 20 * i, text, fromLeft(fill));
    };
    kept.forEach((node, i) => row(i, chance(node.p), node.text, over ? MUTED : BLUE));
    row(kept.length, best.p ? chance(best.p) : "", best.p ? `${best.text} (complete)` : "nothing complete yet", GREEN);
  }

  // --- the next token under temperature and top-p --------------------------------------------------------------

  // The distribution at a temperature and the nucleus of top-p, as attnlib.decoding.next_token: a token is kept if
  // the tokens that are more probable have less than p together.
  function nucleus(logits, temperature, p) {
    const q = softmax(logits.map(z => z / temperature)), kept = range(q.length, () => false);
    let before = 0;
    for (const i of range(q.length).sort((i, j) => q[j] - q[i])) {
      kept[i] = p === 1 || before < p;
      before += q[i];
    }
    const total = sum(q.filter((_, i) => kept[i]));
    return q.map((x, i) => ({ before: x, after: kept[i] ? x / total : 0, kept: kept[i] }));
  }

  const SHOWN_TOKENS = 14;
  const visible = symbol => ({ "\n": "new line", " ": "space" })[symbol] || symbol;

  function samplingExplorer(stage, { symbols, contexts }) {
    const oneLine = text => text.replace(/\n/g, " / ");
    const which = stage.choice("the text so far", contexts.map(({ text }, i) => [i, oneLine(text)]), 3);
    const heat = stage.slider("temperature T", { min: 0.1, max: 2, step: 0.1, value: 1, text: x => x.toFixed(1) });
    const top = stage.slider("top-p", { min: 0.05, max: 1, step: 0.05, value: 0.9, text: x => x.toFixed(2) });
    const bars = stage.panel(700);

    return () => {
      const found = nucleus(contexts[which.value].logits, heat.value, top.value);
      const order = range(symbols.length).sort((i, j) => found[j].before - found[i].before).slice(0, SHOWN_TOKENS);
      const kept = found.filter(token => token.kept).length, best = visible(symbols[order[0]]);
      drawNext(bars, order.map(i => ({ name: visible(symbols[i]), ...found[i] })));
      stage.say(`Top-p keeps ${kept} of ${symbols.length} characters. The most probable one, “${best}”, has probability ` +
        `${chance(found[order[0]].before)} at this temperature, and is drawn with probability ${chance(found[order[0]].after)}.`);
    };
  }

  function drawNext(panel, tokens) {
    const high = 20, left = 74, most = Math.max(...tokens.flatMap(({ before, after }) => [before, after]));
    const wide = (panel.width - left - 60) / most;
    panel.clear(high * tokens.length + 8, "The most probable characters with the probabilities of being drawn: " +
      tokens.map(({ name, after }) => `${name} ${chance(after)}`).join(", ") + ".");
    tokens.forEach(({ name, before, after, kept }, i) => {
      const y = high * i + 4;
      panel.text(left - 8, y + 13, name, fromRight(kept ? TEXT : MUTED));
      panel.rect(left, y + 2, wide * after, high - 5, { fill: BLUE });
      panel.rect(left, y + 2, wide * before, high - 5, { fill: "none", stroke: kept ? TEXT : MUTED, "stroke-width": 1 });
      panel.text(left + wide * Math.max(before, after) + 6, y + 13, kept ? chance(after) : "dropped", fromLeft(kept ? TEXT : MUTED));
    });
  }

  // --- start ---------------------------------------------------------------------------------------------------

  const explorers = {
    saturation, crossover, sinusoids: sinusoidalCode, rotary: rotaryLogits, "shift-mask": shiftExplorer,
    patches: patchExplorer, heads: headExplorer, beams: beamExplorer, sampling: samplingExplorer,
  };

  // `python -m tools.explorers` writes their data to _static/explorers/NAME.js
  const WITH_DATA = new Set(["patches", "heads", "beams", "sampling"]);
  const folder = (document.currentScript?.src || "").replace(/explorers\.js.*/, "explorers/");
  globalThis.explorerData ??= {};

  // Calls `then` once the explorer's data are there: they come when its figure is near.
  function load(name, figure, then) {
    if (!WITH_DATA.has(name) || explorerData[name]) return then();
    const near = new IntersectionObserver(entries => {
      if (!entries.some(entry => entry.isIntersecting)) return;
      near.disconnect();
      document.head.append(html("script", { src: `${folder}${name}.js`, onload: then }));
    }, { rootMargin: "800px" });
    near.observe(figure);
  }

  for (const figure of document.querySelectorAll("figure.explorer")) {
    const name = [...figure.classList].find(word => word.startsWith("explorer-")).slice("explorer-".length);
    load(name, figure, () => {
      const stage = new Stage(figure);
      stage.run(explorers[name](stage, explorerData[name]));
    });
  }
  return { formulas: { softmax, sinusoids, rotary, normals, windowLayout, shiftMask, operations, nucleus } };
})();

"use strict";
// Everything that comes from files is put in place as text or as pixels, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SHOWN = 512; // slots in a gallery
  const SIDE = 448; // pixels of the larger side of a picture
  const find = (node, name) => node.querySelector("." + name);
  const trouble = (text) => {
    const place = document.getElementById("trouble");
    place.hidden = false;
    place.textContent = text;
  };

  async function inflate(text) {
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // One table: codes of the tokens' part, of the slots' part (two bytes each, soft tables only), and of the rest.
  async function unpack(table, M, S) {
    const bytes = await inflate(table.bytes);
    const view = new DataView(bytes.buffer);
    const read = (start, count, [low, step]) =>
      Float64Array.from({ length: count }, (_, i) => low + step * view.getUint16(start + 2 * i, true));
    const head = table.soft ? 2 * (M + S) : 0;
    const [low, step] = table.rest;
    const rest = Float64Array.from(bytes.subarray(head), (code) => low + step * code);
    return table.soft ? { rest, token: read(0, M, table.token), slot: read(2 * M, S, table.slot) } : { rest };
  }

  // Softmax of part + rest over the tokens of each slot, or over the slots of each token; sparse tables are as they are.
  function weights(table, M, S, overTokens) {
    if (!table.token) return table.rest;
    const out = new Float64Array(M * S);
    const [outer, inner] = overTokens ? [S, M] : [M, S];
    for (let o = 0; o < outer; o++) {
      const at = (i) => (overTokens ? i * S + o : o * S + i);
      const logit = (i) => table.rest[at(i)] + (overTokens ? table.token[i] : table.slot[i]);
      let top = -Infinity, sum = 0;
      for (let i = 0; i < inner; i++) top = Math.max(top, logit(i));
      for (let i = 0; i < inner; i++) sum += out[at(i)] = Math.exp(logit(i) - top);
      for (let i = 0; i < inner; i++) out[at(i)] /= sum;
    }
    return out;
  }

  async function decode(block, M, S) {
    const first = await unpack(block.dispatch, M, S);
    const second = block.combine ? await unpack(block.combine, M, S) : first;
    const dispatch = weights(first, M, S, true), combine = weights(second, M, S, false);
    const entropy = new Float64Array(S), given = new Float64Array(S), held = new Float64Array(S);
    for (let m = 0; m < M; m++) for (let s = 0; s < S; s++) {
      held[s] += dispatch[m * S + s];
      given[s] += combine[m * S + s] / M;
    }
    for (let m = 0; m < M; m++) for (let s = 0; s < S; s++) {
      const w = dispatch[m * S + s] / (held[s] || 1);
      if (w > 0) entropy[s] -= w * Math.log(w);
    }
    return { dispatch, combine, entropy, given, held };
  }

  function remember(make, limit) {
    const kept = new Map();
    return (key, ...rest) => {
      if (!kept.has(key)) {
        kept.set(key, make(...rest));
        if (kept.size > limit) kept.delete(kept.keys().next().value);
      }
      return kept.get(key);
    };
  }
  const loadPicture = remember((source) => {
    const image = new Image();
    image.src = source;
    return image.decode().then(() => image);
  }, 64);

  class Panel {
    constructor(model, number) {
      this.model = model;
      this.node = document.getElementById("panel").content.firstElementChild.cloneNode(true);
      this.image = 0; this.layer = model.layers.length - 1; this.slot = null; this.patch = 0; this.turn = 0;
      this.load = remember(decode, 6);
      const heading = this.node.querySelector("h2");
      heading.textContent = model.name;
      heading.id = "model-" + number;
      this.node.setAttribute("aria-labelledby", heading.id);
      const layer = find(this.node, "layer");
      model.layers.forEach((l, i) => layer.add(new Option(l.label, String(i))));
      layer.value = String(this.layer);
      layer.addEventListener("change", () => { this.layer = Number(layer.value); this.slot = null; this.show(); });
      for (const name of ["kind", "order", "stretch"]) find(this.node, name).addEventListener("change", () => this.show());
      find(this.node, "previous").addEventListener("click", () => this.step(-1));
      find(this.node, "next").addEventListener("click", () => this.step(1));
      const canvas = find(this.node, "picture");
      const point = (event) => this.point(event);
      canvas.addEventListener("pointermove", point);
      canvas.addEventListener("pointerdown", point);
      canvas.addEventListener("keydown", (event) => this.key(event));
      find(this.node, "gallery").addEventListener("keydown", (event) => this.galleryKey(event));
    }

    get facts() { return this.model.layers[this.layer]; }
    get grid() { return this.model.images[this.image].grid; }
    get prefix() { return this.facts.tokens - this.grid[0] * this.grid[1]; }
    slotName(s) {
      const per = this.facts.slots_per_expert, expert = Math.floor(s / per);
      if (!this.facts.soft) return "expert " + s;
      return per === 1 ? "slot " + s : "slot " + s + " (expert " + expert + ")";
    }

    async show(image = this.image) {
      const turn = ++this.turn; // a later call wins
      this.image = image;
      const facts = this.facts, M = facts.tokens, S = facts.slots;
      const shown = this.model.images[image];
      const [tables, picture] = await Promise.all([
        this.load(this.layer + "/" + image, facts.blocks[image], M, S),
        loadPicture(shown.picture, data.pictures[shown.picture]),
      ]);
      if (turn !== this.turn) return;
      this.tables = tables;
      this.picture = picture;
      this.patch = Math.min(this.patch, this.grid[0] * this.grid[1] - 1);
      this.order = this.sorted();
      if (this.slot === null) this.slot = tables.given.indexOf(Math.max(...tables.given)); // the strongest
      Object.assign(find(this.node, "plain"), { src: picture.src, alt: shown.caption });
      find(this.node, "prediction").textContent = shown.prediction;
      this.gallery();
      this.draw();
    }

    sorted() {
      const how = find(this.node, "order").value, t = this.tables;
      const key = {
        number: (s) => s, sharp: (s) => t.entropy[s], flat: (s) => -t.entropy[s], weight: (s) => -t.given[s],
      }[how];
      return Array.from({ length: this.facts.slots }, (_, s) => s).sort((a, b) => key(a) - key(b) || a - b);
    }

    // Brightness 0..1 of each patch for one slot: its weight over the largest, or from smallest to largest.
    shades(slot) {
      const S = this.facts.slots, all = this.tables[find(this.node, "kind").value];
      const count = this.grid[0] * this.grid[1], values = new Float64Array(count);
      let low = Infinity, high = 0;
      for (let i = 0; i < count; i++) {
        values[i] = all[(i + this.prefix) * S + slot];
        low = Math.min(low, values[i]); high = Math.max(high, values[i]);
      }
      if (!find(this.node, "stretch").checked) low = 0;
      return { values, shade: values.map((v) => (high > low ? (v - low) / (high - low) : high > 0 ? 1 : 0)) };
    }

    draw() {
      if (!this.tables) return;
      const canvas = find(this.node, "picture"), [rows, columns] = this.grid;
      const scale = SIDE / Math.max(this.picture.width, this.picture.height);
      canvas.width = Math.round(this.picture.width * scale);
      canvas.height = Math.round(this.picture.height * scale);
      const pen = canvas.getContext("2d"), w = canvas.width / columns, h = canvas.height / rows;
      pen.imageSmoothingEnabled = scale < 2;
      find(this.node, "plain").style.imageRendering = scale < 2 ? "auto" : "pixelated";
      pen.drawImage(this.picture, 0, 0, canvas.width, canvas.height);
      const { values, shade } = this.shades(this.slot);
      shade.forEach((s, i) => {
        pen.fillStyle = "rgba(0,0,0," + (0.94 * (1 - s)).toFixed(4) + ")";
        const x = Math.floor((i % columns) * w), y = Math.floor(Math.floor(i / columns) * h);
        pen.fillRect(x, y, Math.floor(((i % columns) + 1) * w) - x, Math.floor((Math.floor(i / columns) + 1) * h) - y);
      });
      pen.lineWidth = 3;
      pen.strokeStyle = "#ffd23f";
      pen.strokeRect((this.patch % columns) * w + 1.5, Math.floor(this.patch / columns) * h + 1.5, w - 3, h - 3);
      this.describe(values);
    }

    describe(values) {
      const t = this.tables, s = this.slot, S = this.facts.slots, columns = this.grid[1];
      const place = "row " + (Math.floor(this.patch / columns) + 1) + ", column " + ((this.patch % columns) + 1);
      const largest = values.reduce((a, b) => Math.max(a, b), 0);
      find(this.node, "slot").textContent = this.slotName(s) + " (of " + S + ")";
      let text;
      if (this.facts.soft) {
        text = "Effective number of tokens " + Math.exp(t.entropy[s]).toFixed(1) + " of " + this.facts.tokens +
          ". Largest weight of a patch " + largest.toFixed(4) + ". Gives " + (100 * t.given[s]).toFixed(2) +
          " % of this image's outputs (" + (100 / S).toFixed(2) + " % if all slots gave alike).";
        if (this.prefix > 0) text += " The class token's weight is " +
          t[find(this.node, "kind").value][s].toFixed(4) + ".";
      } else {
        text = "Holds " + Math.round(t.held[s]) + " of " + this.facts.tokens + " tokens.";
      }
      find(this.node, "facts").textContent = text;
      find(this.node, "picture").setAttribute("aria-label",
        this.model.images[this.image].caption + ", shaded by " + this.slotName(s) + "; patch at " + place);
      find(this.node, "patch-name").textContent = "Patch at " + place + " is made of";
      this.feeds();
    }

    feeds() {
      const S = this.facts.slots, m = this.patch + this.prefix, list = find(this.node, "feeds");
      const row = Array.from(this.tables.combine.subarray(m * S, (m + 1) * S), (w, s) => [w, s]).filter(([w]) => w > 0);
      row.sort((a, b) => b[0] - a[0]);
      const top = row.slice(0, 8);
      if (!top.length) {
        const item = document.createElement("li");
        item.textContent = "nothing: no expert took this patch";
        list.replaceChildren(item);
        return;
      }
      list.replaceChildren(...top.map(([weight, s]) => {
        const item = document.createElement("li"), button = document.createElement("button");
        const name = document.createElement("span"), bar = document.createElement("i"), amount = document.createElement("span");
        button.type = "button";
        name.textContent = (this.facts.soft ? "slot " : "expert ") + s;
        bar.style.width = (100 * weight / top[0][0]).toFixed(1) + "%";
        amount.textContent = (100 * weight).toFixed(weight < 0.1 ? 2 : 1) + " %";
        button.setAttribute("aria-current", String(s === this.slot));
        button.append(name, bar, amount);
        button.addEventListener("click", () => this.choose(s));
        item.append(button);
        return item;
      }));
    }

    gallery() {
      const list = find(this.node, "gallery"), [rows, columns] = this.grid;
      const shown = this.order.slice(0, SHOWN), total = this.order.length;
      find(this.node, "count").textContent = total > SHOWN ? "the first " + SHOWN + " of " + total : total + " slots";
      list.replaceChildren(...shown.map((s) => {
        const item = document.createElement("div"), canvas = document.createElement("canvas");
        canvas.width = columns; canvas.height = rows;
        const pen = canvas.getContext("2d"), pixels = pen.createImageData(columns, rows);
        this.shades(s).shade.forEach((v, i) => pixels.data.set([255 * v, 255 * v, 255 * v, 255], 4 * i));
        pen.putImageData(pixels, 0, 0);
        item.append(canvas, String(s));
        item.setAttribute("role", "option");
        item.setAttribute("aria-label", this.slotName(s));
        item.dataset.slot = String(s);
        item.addEventListener("click", () => this.choose(s));
        return item;
      }));
      this.mark();
    }

    mark() {
      for (const item of find(this.node, "gallery").children) {
        const here = Number(item.dataset.slot) === this.slot;
        item.setAttribute("aria-selected", String(here));
        item.tabIndex = here ? 0 : -1;
      }
    }

    choose(slot) {
      this.slot = slot;
      this.mark();
      this.draw();
    }

    step(by) {
      const place = this.order.indexOf(this.slot) + by, count = this.order.length;
      this.choose(this.order[(place + count) % count]);
    }

    point(event) {
      if (!this.tables) return;
      const box = find(this.node, "picture").getBoundingClientRect(), [rows, columns] = this.grid;
      const row = Math.floor((event.clientY - box.top) / box.height * rows);
      const column = Math.floor((event.clientX - box.left) / box.width * columns);
      if (row < 0 || row >= rows || column < 0 || column >= columns) return;
      const patch = row * columns + column;
      if (patch !== this.patch) { this.patch = patch; this.draw(); }
    }

    key(event) {
      const [rows, columns] = this.grid;
      let row = Math.floor(this.patch / columns), column = this.patch % columns;
      const moves = {
        ArrowUp: () => (row = Math.max(0, row - 1)), ArrowDown: () => (row = Math.min(rows - 1, row + 1)),
        ArrowLeft: () => (column = Math.max(0, column - 1)), ArrowRight: () => (column = Math.min(columns - 1, column + 1)),
        PageUp: () => this.step(-1), PageDown: () => this.step(1),
      };
      if (!moves[event.key] || !this.tables) return;
      event.preventDefault();
      moves[event.key]();
      this.patch = row * columns + column;
      this.draw();
    }

    galleryKey(event) {
      const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.step(by);
      const chosen = find(this.node, "gallery").querySelector("[aria-selected=true]");
      if (chosen) chosen.focus();
    }
  }

  async function choose(panels, image) {
    const buttons = document.querySelectorAll("#images button");
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === image)));
    document.getElementById("caption").textContent = data.models[0].images[image].caption;
    await Promise.all(panels.map((panel) => panel.show(image)));
  }

  async function start() {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old: it has no DecompressionStream");
    const panels = data.models.map((model, i) => new Panel(model, i));
    document.getElementById("models").append(...panels.map((panel) => panel.node));
    document.getElementById("chooser").hidden = false;
    const strip = document.getElementById("images");
    data.models[0].images.forEach((image, i) => {
      const button = document.createElement("button"), picture = document.createElement("img");
      button.type = "button";
      picture.src = data.pictures[image.picture];
      picture.alt = image.caption;
      button.append(picture);
      button.addEventListener("click", () => choose(panels, i).catch(fail));
      strip.append(button);
    });
    await choose(panels, 0);
  }
  const fail = (error) => {
    trouble("The slots cannot be shown: " + error.message);
    document.documentElement.dataset.state = "failed";
  };
  if (data.models.some((model) => model.images.length)) {
    start().then(() => { document.documentElement.dataset.state = "ready"; }).catch(fail);
  } else document.documentElement.dataset.state = "ready";
})();

// Small multiples: one strip for each kv head of each layer, the text from left to right. One of them is enlarged.

const GAP = 3, LABEL = 26; // pixels

// The colours of the style sheet, as numbers: level 0 is nothing, 1 to 8 the scale.
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const numbers = (name) => {
    const text = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  };
  const names = ["--page", "--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8"];
  return { levels: names.map(numbers), text: style.getPropertyValue("--text"), faint: style.getPropertyValue("--faint") };
}

// How much of each of `bins` parts of the text is there, from 0 to 1: `weigh(add)` calls add(position, weight).
// 1 is all tokens of a part, or, if `isRelative`, the part with the most.
export function binned(tokens, bins, weigh, isRelative = false) {
  const sums = new Float32Array(bins);
  const scale = bins / Math.max(tokens, 1);
  weigh((position, weight) => {
    const start = position * scale, stop = Math.max(start + scale, Math.floor(start) + 1e-6);
    for (let bin = Math.floor(start); bin < Math.min(bins, Math.ceil(stop)); bin++) sums[bin] += weight;
  });
  const each = isRelative ? Math.max(...sums) || 1 : Math.max(1, 1 / scale); // tokens of a bin
  for (let bin = 0; bin < bins; bin++) sums[bin] = Math.min(1, sums[bin] / each);
  return sums;
}

function sized(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = Math.max(40, Math.round(canvas.clientWidth * ratio));
  height = Math.round(height * ratio);
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  canvas.style.height = `${height / ratio}px`;
  return { context: canvas.getContext("2d"), width, height, ratio };
}

function paint(image, width, top, rows, shares, colours, left) {
  const { levels } = colours;
  for (let x = 0; x < shares.length; x++) {
    // One kept token among a thousand must still be seen: the scale is of the cube root.
    const level = shares[x] > 0 ? Math.max(2, Math.round(Math.cbrt(shares[x]) * 8)) : 0;
    const [red, green, blue] = levels[level];
    for (let y = top; y < top + rows; y++) {
      const at = 4 * (y * width + left + x);
      image.data[at] = red;
      image.data[at + 1] = green;
      image.data[at + 2] = blue;
      image.data[at + 3] = 255;
    }
  }
}

// The strip above the text: the share of all heads, and the part of the text on the screen.
export function drawOverview(canvas, state, mask, visible) {
  const { context, width, height, ratio } = sized(canvas, 18);
  const image = context.createImageData(width, height);
  const tokens = state.tokens;
  const shares = binned(tokens, width, (add) => {
    for (let token = 0; token < tokens; token++) {
      const share = mask ? mask[token] : state.share(token);
      if (share) add(token, share);
    }
  });
  const colours = palette();
  paint(image, width, 0, height, shares, colours, 0);
  context.putImageData(image, 0, 0);
  context.strokeStyle = colours.text;
  context.lineWidth = ratio;
  const [first, last] = visible.map((token) => token / Math.max(tokens, 1) * width);
  context.strokeRect(first + ratio, ratio, Math.max(3 * ratio, last - first - 2 * ratio), height - 2 * ratio);
}

export class Grid {
  constructor(canvas, zoom, choose) {
    Object.assign(this, { canvas, zoom, choose, chosen: null, by: "" });
    canvas.addEventListener("click", (event) => {
      const y = event.clientY - canvas.getBoundingClientRect().top;
      const row = this.rows?.find(({ top, bottom }) => y >= top && y < bottom);
      this.pick(row ? row.own : null);
    });
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
      if (event.key === "Escape") this.pick(null);
      else if (event.key in steps && this.rows?.length) {
        const now = this.rows.findIndex(({ own }) => this.isChosen(own));
        const next = Math.max(0, Math.min(this.rows.length - 1, now < 0 ? 0 : now + steps[event.key]));
        this.pick(this.rows[next].own, true);
      } else return;
      event.preventDefault();
    });
  }

  isChosen({ layer, head }) {
    return this.chosen !== null && this.chosen.layer === layer && this.chosen.head === head;
  }

  pick(own, isKept = false) {
    this.chosen = own === null || (!isKept && this.isChosen(own)) ? null : { layer: own.layer, head: own.head };
    this.choose();
  }

  // 1 for each position that the chosen head holds (null: no head is chosen).
  mask(state) {
    const plane = this.chosen && state.planeAt(this.chosen);
    if (!plane) return null;
    const mask = new Uint8Array(state.tokens);
    for (let slot = plane.start; slot < plane.start + plane.slots; slot++) {
      if (state.positions[slot] >= 0) mask[state.positions[slot]] = 1;
    }
    return mask;
  }

  sharesOf(state, plane, bins) {
    const values = state.numbers[this.by];
    return binned(state.tokens, bins, (add) => {
      for (let slot = plane.start; slot < plane.start + plane.slots; slot++) {
        const position = state.positions[slot];
        if (position >= 0) add(position, values ? Math.max(values[slot], 1e-6) || 1e-6 : 1);
      }
    }, values !== undefined);
  }

  draw(state) {
    const heads = state.allHeads();
    const each = Math.max(3, Math.min(12, Math.floor(260 / Math.max(heads.length, 1))));
    const layers = new Set(heads.map(({ layer }) => layer)).size;
    const { context, width, ratio } = sized(this.canvas, heads.length * (each + 1) + layers * GAP + 2);
    const colours = palette(), left = Math.round(LABEL * ratio);
    const image = context.createImageData(width, this.canvas.height);
    this.rows = [];
    let top = 1, before = -1, shares = null, plane = null;
    for (const own of heads) {
      if (own.layer !== before) top += GAP;
      if (own.plane !== plane) shares = this.sharesOf(state, own.plane, width - left - Math.round(2 * ratio));
      paint(image, width, Math.round(top * ratio), Math.max(1, Math.round(each * ratio)), shares, colours, left);
      this.rows.push({ own, top, bottom: top + each + 1, isFirst: own.layer !== before });
      ({ layer: before, plane } = own);
      top += each + 1;
    }
    context.putImageData(image, 0, 0);
    context.font = `${10 * ratio}px system-ui, sans-serif`;
    context.fillStyle = colours.faint;
    context.strokeStyle = colours.text;
    context.lineWidth = 1.5 * ratio;
    const every = Math.ceil(12 / Math.max(1, heads.length / layers * (each + 1) + GAP)); // labels that do not touch
    this.rows.filter((row) => row.isFirst).forEach((row, index) => {
      if (index % every === 0) context.fillText(`${row.own.layer}`, 2 * ratio, (row.top + 9) * ratio);
    });
    for (const row of this.rows.filter(({ own }) => this.isChosen(own))) {
      context.strokeRect(left - ratio, (row.top - 1) * ratio, width - left, (each + 2) * ratio);
    }
  }

  // The chosen head, enlarged, and a description of its tokens.
  drawZoom(state) {
    const plane = this.chosen && state.planeAt(this.chosen);
    if (!plane) return null;
    const { context, width, height } = sized(this.zoom, 56);
    const image = context.createImageData(width, height);
    paint(image, width, 0, height, this.sharesOf(state, plane, width), palette(), 0);
    context.putImageData(image, 0, 0);
    const { layer, head } = this.chosen;
    const alike = plane.heads.length > 1 ? `, as all ${plane.heads.length} of its group do` : "";
    const window = plane.window ? `, sliding window ${plane.window}` : "";
    return `layer ${layer}, kv head ${head} holds ${plane.count.toLocaleString("en")} of ` +
      `${state.told.next.toLocaleString("en")} tokens in ${plane.slots.toLocaleString("en")} slots${window}${alike}`;
  }
}

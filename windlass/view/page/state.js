// Tokens of the row at one frame, and a timeline of frames.

import { FULL } from "./wire.js";

export const EMPTY = -1;

export class State {
  constructor() {
    this.planes = []; // {layer, heads, slots, window, start, count}
    this.positions = new Int32Array(0);
    this.planeOf = new Uint32Array(0);
    this.held = new Uint16Array(1024); // per position: how many kv heads, of all layers, hold it
    this.heads = 0; // of all layers
    this.numbers = {};
    this.ids = [];
    this.strings = [];
    this.told = null;
    this.back = new Set(); // positions that this frame brought back
    this.recalled = new Map(); // position: the kv heads, {layer, head}, that the newest step read it again for
  }

  get tokens() {
    return this.told ? Math.max(this.ids.length, this.told.next) : 0;
  }

  get kept() {
    return this.planes.reduce((most, plane) => Math.max(most, plane.count), 0);
  }

  share(position) {
    return this.heads ? this.held[position] / this.heads : 0;
  }

  applyText({ text, ids, strings }) {
    this.ids.length = this.strings.length = text;
    for (let at = 0; at < ids.length; at++) {
      this.ids.push(ids[at]);
      this.strings.push(strings[at]);
    }
  }

  apply(frame) {
    const { told, kind, arrays } = frame;
    const seen = this.told ? this.told.next : 0;
    this.applyText(told);
    this.told = told;
    this.back = new Set();
    this.room(told.next);
    const old = this.heads ? this.held.slice(0, seen) : null;
    let at = 0;
    if (kind === FULL) {
      this.lay(told.planes);
      this.formula = told.formula;
      for (let slot = 0; slot < this.positions.length; slot++, at += 4) this.put(slot, arrays.getInt32(at, true));
    } else {
      for (let change = 0; change < told.changes; change++, at += 8) {
        const slot = arrays.getUint32(at, true);
        if (slot >= this.positions.length) throw new Error("A frame names a slot that does not exist.");
        this.put(slot, arrays.getInt32(at + 4, true));
      }
    }
    if (kind === FULL) this.numbers = {};
    for (const name of told.numbers) {
      const values = new Float32Array(this.positions.length);
      for (let slot = 0; slot < values.length; slot++, at += 4) values[slot] = arrays.getFloat32(at, true);
      this.numbers[name] = values;
    }
    this.recall(arrays, at);
    if (old) {
      for (let position = 0; position < old.length; position++) {
        if (!old[position] && this.held[position]) this.back.add(position);
      }
    }
  }

  recall(arrays, at) {
    this.recalled = new Map();
    for (const [layer, heads, tokens] of this.told.recalled ?? []) {
      for (const head of heads) {
        for (let token = 0; token < tokens; token++, at += 4) {
          const position = arrays.getInt32(at, true);
          if (position === EMPTY) continue;
          if (!this.recalled.has(position)) this.recalled.set(position, []);
          this.recalled.get(position).push({ layer, head });
        }
      }
    }
  }

  // Whether a kv head, {layer, head}, or with null any, read a position again.
  isRecalled(position, own) {
    const readers = this.recalled.get(position);
    if (!readers || own === null) return readers !== undefined;
    return readers.some(({ layer, head }) => layer === own.layer && head === own.head);
  }

  lay(planes) {
    let start = 0;
    this.planes = planes.map(([layer, heads, slots, window]) => {
      start += slots;
      return { layer, heads, slots, window, start: start - slots, count: 0 };
    });
    this.heads = this.planes.reduce((sum, plane) => sum + plane.heads.length, 0);
    this.positions = new Int32Array(start).fill(EMPTY);
    this.planeOf = new Uint32Array(start);
    this.planes.forEach((plane, index) => this.planeOf.fill(index, plane.start, plane.start + plane.slots));
    this.held.fill(0);
  }

  room(tokens) {
    if (tokens <= this.held.length) return;
    const held = new Uint16Array(Math.max(tokens, 2 * this.held.length));
    held.set(this.held);
    this.held = held;
  }

  put(slot, position) {
    const plane = this.planes[this.planeOf[slot]];
    const before = this.positions[slot];
    if (before >= 0) {
      this.held[before] -= plane.heads.length;
      plane.count--;
    }
    if (position >= this.held.length) throw new Error("A frame names a position beyond the text.");
    if (position >= 0) {
      this.held[position] += plane.heads.length;
      plane.count++;
    }
    this.positions[slot] = position;
  }

  // Where a position is held: {plane, slot} of each plane that does.
  places(position) {
    const found = [];
    if (!this.held[position]) return found;
    for (let slot = 0; slot < this.positions.length; slot++) {
      if (this.positions[slot] === position) found.push({ plane: this.planes[this.planeOf[slot]], slot });
    }
    return found;
  }

  // The plane of a kv head: {layer, head}.
  planeAt({ layer, head }) {
    return this.planes.find((plane) => plane.layer === layer && plane.heads.includes(head));
  }

  // All kv heads, from the bottom layer up: {layer, head, plane}.
  allHeads() {
    const found = this.planes.flatMap((plane) => plane.heads.map((head) => ({ layer: plane.layer, head, plane })));
    return found.sort((one, other) => one.layer - other.layer || one.head - other.head);
  }

  rank(plane, position) {
    let rank = 0;
    for (let slot = plane.start; slot < plane.start + plane.slots; slot++) {
      const other = this.positions[slot];
      if (other >= 0 && other < position) rank++;
    }
    return rank;
  }
}

// Where a key at `position` of a plane is read, and from where the newest token reads: {key, query} (null: not known).
export function readAt(state, header, plane, position) {
  const newest = state.told.next - 1;
  const isAuto = header.positions === "auto";
  const mode = isAuto && plane.window ? "original" : state.told.mode;
  const found = /^(\w+)(?:\(([\d, ]+)\))?$/.exec(mode);
  if (!found) return null;
  const numbers = (found[2] || "").split(",").map(Number);
  if (found[1] === "original") return { key: position, query: newest };
  if (found[1] === "compact") return { key: state.rank(plane, position), query: plane.count - 1 };
  if (found[1] === "clamp") {
    const [limit] = numbers;
    return { key: Math.max(0, limit - (newest - position)), query: limit };
  }
  if (found[1] !== "self_extend") return null;
  const [group, near] = numbers, byRank = isAuto && header.budget !== null;
  const key = byRank ? state.rank(plane, position) : position, query = byRank ? plane.count - 1 : newest;
  const far = Math.floor(query / group) + near - Math.floor(near / group);
  const last = isAuto ? header.trained_length - 1 : Infinity;
  const read = newest - position < near ? far - (query - key) : Math.floor(key / group);
  return { key: Math.min(Math.max(read, 0), last), query: Math.min(far, last) };
}

// Frames, and the state at one of them. `frames[0]` is FULL.
export class Timeline {
  constructor(header, headerBytes, frames = []) {
    Object.assign(this, { header, headerBytes, frames });
    this.bytes = 0;
    this.at = -1;
    this.state = new State();
  }

  add(frame) {
    this.frames.push(frame);
    this.bytes += frame.bytes.length;
  }

  seek(to) {
    to = Math.max(0, Math.min(to, this.frames.length - 1));
    if (to === this.at || !this.frames.length) return this.state;
    if (to === this.at + 1) {
      this.state.apply(this.frames[to]);
    } else {
      let full = to;
      while (full > 0 && this.frames[full].kind !== FULL) full--;
      const state = to > this.at ? this.state : new State();
      const from = to > this.at ? Math.max(full, this.at + 1) : full;
      for (let at = to > this.at ? this.at + 1 : 0; at < from; at++) state.applyText(this.frames[at].told);
      for (let at = from; at <= to; at++) state.apply(this.frames[at]);
      if (from === to) state.back.clear(); // told apart from a frame long before, not from the one before
      this.state = state;
    }
    this.at = to;
    if (to === 0) this.state.back.clear();
    return this.state;
  }

  // Tokens per second between this frame and an earlier one, over at least `seconds` where there are so many.
  speed(seconds = 1) {
    const now = this.frames[this.at]?.told;
    if (!now) return null;
    for (let at = this.at - 1; at >= 0; at--) {
      const then = this.frames[at].told;
      if (now.seconds - then.seconds >= seconds || at === 0) {
        return now.seconds > then.seconds ? (now.seen - then.seen) / (now.seconds - then.seconds) : null;
      }
    }
    return null;
  }
}

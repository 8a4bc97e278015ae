// Records of a recording or of a live stream. Their format is in windlass/view/frames.py.

export const HEADER = 0, FULL = 1, DELTA = 2, STATUS = 3, END = 4;
export const VERSION = 1;
const MAGIC = new TextEncoder().encode("windview");
const HEAD = 12;
const MOST = 2 ** 28;

const TABLE = new Uint32Array(256).map((_, at) => {
  for (let bit = 0; bit < 8; bit++) at = at & 1 ? (at >>> 1) ^ 0xedb88320 : at >>> 1;
  return at;
});

export function crc32(bytes, before = 0) {
  let sum = ~before;
  for (let at = 0; at < bytes.length; at++) sum = TABLE[(sum ^ bytes[at]) & 255] ^ (sum >>> 8);
  return ~sum >>> 0;
}

// Takes bytes as they come, and gives out the records that are whole. `bytes` of a record are all of it.
export class Parser {
  constructor() {
    this.rest = new Uint8Array(0);
    this.hasBegun = false;
    this.count = 0;
  }

  push(more) {
    const data = new Uint8Array(this.rest.length + more.length);
    data.set(this.rest);
    data.set(more, this.rest.length);
    const found = [];
    let at = 0;
    if (!this.hasBegun && data.length >= MAGIC.length) {
      if (MAGIC.some((byte, index) => data[index] !== byte)) throw new Error("This is no recording of windlass.");
      this.hasBegun = true;
      at = MAGIC.length;
    }
    const view = new DataView(data.buffer);
    while (this.hasBegun && data.length - at >= HEAD) {
      const kind = view.getUint32(at, true), length = view.getUint32(at + 4, true);
      if (kind > END || length > MOST) throw damaged(this.count);
      if (data.length - at < HEAD + length) break;
      const payload = data.subarray(at + HEAD, at + HEAD + length);
      if (crc32(payload, crc32(data.subarray(at, at + 8))) !== view.getUint32(at + 8, true)) throw damaged(this.count);
      found.push({ kind, payload, bytes: data.subarray(at, at + HEAD + length) });
      at += HEAD + length;
      this.count++;
    }
    this.rest = data.slice(at);
    return found;
  }
}

function damaged(number) {
  return new Error(`The recording is damaged in record ${number}.`);
}

// The header and the frames of a whole file.
export function parseFile(bytes) {
  const parser = new Parser();
  const records = parser.push(bytes);
  const last = records.pop();
  if (!last || last.kind !== END || parser.rest.length) throw new Error("The recording is cut off, or not one of windlass.");
  if (new DataView(last.payload.buffer, last.payload.byteOffset).getUint32(0, true) !== records.length) {
    throw damaged(records.length);
  }
  const header = records.shift();
  const frames = records.filter((each) => each.kind === FULL || each.kind === DELTA);
  if (!header || header.kind !== HEADER || frames.length !== records.length || !frames.length) throw damaged(0);
  const told = headerOf(header);
  return { header: told, headerBytes: header.bytes, frames: frames.map(frameOf) };
}

export function headerOf(record) {
  const told = jsonOf(record.payload);
  if (told.version !== VERSION) throw new Error(`The recording has version ${told.version}. This page reads ${VERSION}.`);
  return told;
}

export function jsonOf(payload) {
  return JSON.parse(new TextDecoder().decode(payload));
}

// A FULL or DELTA record: the fields of its JSON, and a view of its arrays.
export function frameOf(record) {
  const { payload, kind, bytes } = record;
  const length = new DataView(payload.buffer, payload.byteOffset).getUint32(0, true);
  const told = jsonOf(payload.subarray(4, 4 + length));
  const start = payload.byteOffset + 4 + length;
  return { kind, bytes, told, arrays: new DataView(payload.buffer, start, payload.length - 4 - length) };
}

// A file of these records, as windlass/view/recording.py writes it.
export function fileOf(headerBytes, frames) {
  const end = new DataView(new ArrayBuffer(HEAD + 4));
  end.setUint32(0, END, true);
  end.setUint32(4, 4, true);
  end.setUint32(12, frames.length + 1, true);
  const bytes = new Uint8Array(end.buffer);
  end.setUint32(8, crc32(bytes.subarray(12), crc32(bytes.subarray(0, 8))), true);
  return new Blob([MAGIC, headerBytes, ...frames.map((each) => each.bytes), bytes]);
}

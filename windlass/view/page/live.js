// Frames of a running server: looked at only while the page is on the screen.

import { HEADER, STATUS, Parser, frameOf, headerOf, jsonOf, FULL } from "./wire.js";
import { Timeline } from "./state.js";

const MOST = 64 * 2 ** 20; // bytes of frames that are kept to go back to
const AGAIN = 2000; // milliseconds

export class Live {
  constructor({ headers, begun, grown, status, state, refused }) {
    Object.assign(this, { headers, begun, grown, status, state, refused });
    this.row = "";
    this.isWanted = true;
    document.addEventListener("visibilitychange", () => document.hidden ? this.stop() : this.isWanted && this.start());
  }

  stop() {
    clearTimeout(this.timer);
    this.running?.abort();
    this.running = null;
  }

  start() {
    this.stop();
    this.follow();
  }

  async follow() {
    const running = this.running = new AbortController();
    try {
      const asked = this.row === "" ? "" : `?text=${encodeURIComponent(this.row)}`;
      const answer = await fetch(`view/frames${asked}`, { headers: this.headers(), signal: running.signal, cache: "no-store" });
      if (answer.status === 401) this.refused();
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      this.state("live");
      const reader = answer.body.getReader(), parser = new Parser();
      let timeline = null;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        let isGrown = false;
        for (const record of parser.push(value)) {
          if (record.kind === HEADER) {
            timeline = new Timeline(headerOf(record), record.bytes);
            this.begun(timeline);
          } else if (record.kind === STATUS) {
            this.status(jsonOf(record.payload));
          } else if (timeline) {
            if (record.kind !== FULL && !timeline.frames.length) throw new Error("frames begin in the middle");
            timeline.add(frameOf(record));
            isGrown = true;
          }
        }
        if (isGrown) this.grown();
        if (timeline && timeline.bytes > MOST) return this.start();
      }
      throw new Error("the server ended the stream");
    } catch (error) {
      if (running !== this.running) return;
      this.state(`not connected: ${error.message}`);
      this.timer = setTimeout(() => this.start(), AGAIN);
    }
  }
}

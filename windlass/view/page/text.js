// The whole text, each token shaded by the share of kv heads that hold it. Only blocks near the screen have elements.

const BLOCK = 256; // tokens at least: a block ends at a line's end, so that it breaks no line
const LONGEST = 1024;
const CHARACTERS = 90; // of a line, to guess the height of a block that was never shown
const LINE = 26; // pixels
export const LEVELS = 8;

export function levelOf(share) {
  return share > 0 ? 1 + Math.min(LEVELS - 1, Math.floor(share * LEVELS)) : 0;
}

export class TextView {
  constructor(element, choose) {
    this.element = element;
    this.choose = choose; // called with the token that is pointed at, or -1
    this.blocks = [];
    this.cursor = -1;
    this.seen = new IntersectionObserver((entries) => this.scrolled(entries), { root: element, rootMargin: "800px" });
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("pointerover", (event) => {
      const token = event.target.dataset?.token;
      if (token !== undefined) this.choose(Number(token));
    });
    element.addEventListener("click", (event) => {
      const token = event.target.dataset?.token;
      if (token !== undefined) this.moveTo(Number(token), false);
    });
    element.addEventListener("focus", () => this.cursor < 0 && this.state?.tokens && this.moveTo(this.firstOnScreen(), false));
  }

  reset() {
    this.seen.disconnect();
    this.blocks = [];
    this.element.replaceChildren();
    this.cursor = -1;
    this.state = null;
  }

  // Show `state`. `mask` has 1 for each position that the `chosen` head holds. Both are null where none is chosen.
  show(state, header, mask, chosen) {
    Object.assign(this, { state, header, mask, chosen });
    const isAtEnd = this.element.scrollTop + this.element.clientHeight >= this.element.scrollHeight - 60;
    const had = this.stop;
    this.divide(state.tokens);
    for (const block of this.blocks) if (block.spans) this.fill(block);
    if (isAtEnd && this.follows && this.stop > had) this.element.scrollTop = this.element.scrollHeight;
  }

  // One past the last token that is in a block.
  get stop() {
    return this.blocks.at(-1)?.stop ?? 0;
  }

  // Let the blocks have so many tokens.
  divide(tokens) {
    while (this.blocks.length && this.blocks.at(-1).start >= tokens) {
      const block = this.blocks.pop();
      this.seen.unobserve(block.element);
      block.element.remove();
    }
    const last = this.blocks.at(-1);
    if (last && last.stop > tokens) {
      last.stop = tokens;
      this.guess(last);
    }
    while (this.stop < tokens) {
      let block = this.blocks.at(-1);
      if (!block || this.isWhole(block)) block = this.append(this.stop);
      while (block.stop < tokens && !this.isWhole(block)) block.stop++;
      this.guess(block);
    }
  }

  isWhole({ start, stop }) {
    return stop - start >= LONGEST || (stop - start >= BLOCK && (this.state.strings[stop - 1] ?? "").endsWith("\n"));
  }

  append(start) {
    const element = document.createElement("div");
    const block = { element, start, stop: start, spans: null, height: 0 };
    element.block = block;
    this.blocks.push(block);
    this.element.append(element);
    this.seen.observe(element);
    return block;
  }

  // The block of a token.
  of(token) {
    let low = 0, high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.blocks[middle].start <= token) low = middle;
      else high = middle - 1;
    }
    return this.blocks[low];
  }

  guess(block) {
    if (block.spans) return;
    let characters = 0, lines = 0;
    for (let token = block.start; token < block.stop; token++) {
      const text = this.state.strings[token] ?? "····";
      characters += text.length;
      if (text.includes("\n")) lines++;
    }
    block.element.style.height = `${(block.height || LINE * (lines + Math.ceil(characters / CHARACTERS)))}px`;
  }

  scrolled(entries) {
    for (const { target, isIntersecting } of entries) {
      const { block } = target;
      if (isIntersecting && !block.spans) {
        this.fill(block);
      } else if (!isIntersecting && block.spans) {
        block.height = target.offsetHeight;
        block.spans = null;
        target.replaceChildren();
        this.guess(block);
      }
    }
  }

  fill(block) {
    const { start, stop } = block;
    if (!block.spans) {
      block.spans = [];
      block.element.style.height = "";
    }
    while (block.spans.length > stop - start) block.spans.pop().remove();
    for (let token = start; token < stop; token++) {
      let span = block.spans[token - start];
      if (!span) {
        span = document.createElement("span");
        span.dataset.token = token;
        span.id = `token-${token}`;
        block.spans.push(span);
        block.element.append(span);
      }
      const text = this.state.strings[token] ?? "·";
      if (span.textContent !== text) span.textContent = text;
      const kind = this.kindOf(token);
      if (span.className !== kind) span.className = kind;
    }
  }

  kindOf(token) {
    const { state, header, mask } = this;
    const level = mask ? (mask[token] ? LEVELS : 0) : levelOf(state.share(token));
    let kind = `s${level}`;
    if (header.budget !== null) {
      if (token < header.sinks) kind += " sink";
      else if (token >= state.told.next - header.window) kind += " window";
    }
    if (state.isRecalled(token, this.chosen)) kind += " recalled";
    if (state.back.has(token)) kind += " back";
    if (token === this.cursor) kind += " cursor";
    return kind;
  }

  firstOnScreen() {
    const top = this.element.getBoundingClientRect().top;
    for (const { spans } of this.blocks) {
      const found = spans?.find((span) => span.getBoundingClientRect().bottom > top + 4);
      if (found) return Number(found.dataset.token);
    }
    return 0;
  }

  // Go to a token: it is marked and told of, and scrolled to where it is not on the screen.
  moveTo(token, isCentred) {
    const before = this.cursor;
    this.cursor = Math.max(0, Math.min(token, this.state.tokens - 1));
    if (before >= 0 && before < this.state.tokens) this.mark(before);
    const block = this.of(this.cursor);
    if (isCentred || !block.spans) {
      block.element.scrollIntoView({ block: "start" });
      this.fill(block);
    }
    this.mark(this.cursor);
    const span = block.spans[this.cursor - block.start];
    span.scrollIntoView({ block: isCentred ? "center" : "nearest" });
    this.element.setAttribute("aria-activedescendant", span.id);
    this.choose(this.cursor);
  }

  mark(token) {
    const block = this.of(token), span = block.spans?.[token - block.start];
    if (span) span.className = this.kindOf(token);
  }

  key(event) {
    if (!this.state?.tokens || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 16, ArrowUp: -16, PageDown: BLOCK, PageUp: -BLOCK };
    if (event.key in steps) this.moveTo(this.cursor + steps[event.key], false);
    else if (event.key === "Home") this.moveTo(0, true);
    else if (event.key === "End") this.moveTo(this.state.tokens - 1, true);
    else return;
    event.preventDefault();
  }

  // The tokens on the screen: [first, behind the last].
  get visible() {
    const { scrollTop, clientHeight, scrollHeight } = this.element;
    const tokens = this.state?.tokens ?? 0;
    return [scrollTop / scrollHeight * tokens, (scrollTop + clientHeight) / scrollHeight * tokens];
  }
}

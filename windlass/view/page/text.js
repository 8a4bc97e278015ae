// The whole text, each token shaded by the share of kv heads that hold it. Only blocks near the screen have elements.

const BLOCK = 256; // tokens
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

  // Show `state`; `mask` has 1 for each position that a chosen head holds, null where none is chosen.
  show(state, header, mask) {
    Object.assign(this, { state, header, mask });
    const isAtEnd = this.element.scrollTop + this.element.clientHeight >= this.element.scrollHeight - 60;
    const wanted = Math.ceil(state.tokens / BLOCK);
    const had = this.blocks.length;
    while (this.blocks.length > wanted) {
      const block = this.blocks.pop();
      this.seen.unobserve(block.element);
      block.element.remove();
    }
    for (let index = this.blocks.length; index < wanted; index++) {
      const element = document.createElement("div");
      element.dataset.block = index;
      this.blocks.push({ element, spans: null, height: 0 });
      this.guess(this.blocks[index], index);
      this.element.append(element);
      this.seen.observe(element);
    }
    for (let index = 0; index < wanted; index++) if (this.blocks[index].spans) this.fill(index);
    if (isAtEnd && this.follows && wanted >= had) this.element.scrollTop = this.element.scrollHeight;
  }

  guess(block, index) {
    let characters = 0, lines = 0;
    for (let token = index * BLOCK; token < (index + 1) * BLOCK; token++) {
      const text = this.state.strings[token] ?? "····";
      characters += text.length;
      if (text.includes("\n")) lines++;
    }
    block.element.style.height = `${(block.height || LINE * (lines + Math.ceil(characters / CHARACTERS)))}px`;
  }

  scrolled(entries) {
    for (const { target, isIntersecting } of entries) {
      const index = Number(target.dataset.block), block = this.blocks[index];
      if (!block || block.element !== target) continue;
      if (isIntersecting && !block.spans) {
        this.fill(index);
      } else if (!isIntersecting && block.spans) {
        block.height = target.offsetHeight;
        block.spans = null;
        target.replaceChildren();
        this.guess(block, index);
      }
    }
  }

  fill(index) {
    const block = this.blocks[index];
    const start = index * BLOCK, stop = Math.min(start + BLOCK, this.state.tokens);
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
    const index = Math.floor(this.cursor / BLOCK);
    if (isCentred || !this.blocks[index].spans) {
      this.blocks[index].element.scrollIntoView({ block: "start" });
      this.fill(index);
    }
    this.mark(this.cursor);
    const span = this.blocks[index].spans[this.cursor % BLOCK];
    span.scrollIntoView({ block: isCentred ? "center" : "nearest" });
    this.element.setAttribute("aria-activedescendant", span.id);
    this.choose(this.cursor);
  }

  mark(token) {
    const span = this.blocks[Math.floor(token / BLOCK)].spans?.[token % BLOCK];
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

// A chat with the server that gave out this page, by OpenAI's wire format.

// The values of the `data:` lines of an event stream.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

export class Chat {
  constructor(elements, headers, refused) {
    Object.assign(this, elements, { headers, refused });
    this.said = [];
    this.model = "";
    this.ask.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    this.clear.addEventListener("click", () => {
      this.running?.abort();
      this.said = [];
      this.messages.replaceChildren();
      this.prompt.focus();
    });
  }

  line(who, text, kind = "") {
    const element = document.createElement("p"), name = document.createElement("span"), body = document.createElement("span");
    element.className = `message ${kind}`;
    name.className = "who";
    name.textContent = who;
    body.textContent = text;
    element.append(name, body);
    this.messages.append(element);
    this.messages.scrollTop = this.messages.scrollHeight;
    return { element, body };
  }

  async send() {
    const text = this.prompt.value.trim();
    if (!text || this.running) return;
    this.prompt.value = "";
    this.line("you", text);
    const said = [...this.said, { role: "user", content: text }];
    const { element, body } = this.line(this.model || "model", "");
    this.running = new AbortController();
    this.stop.disabled = false;
    let written = "";
    try {
      const asked = { model: this.model, messages: said, stream: true, stream_options: { include_usage: true } };
      const answer = await fetch("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...this.headers() },
        body: JSON.stringify(asked),
        signal: this.running.signal,
      });
      if (!answer.ok) {
        if (answer.status === 401) this.refused();
        const told = await answer.json().catch(() => null);
        throw new Error(told?.error?.message ?? `the server answered ${answer.status}`);
      }
      for await (const data of events(answer.body)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message ?? "the server failed");
        written += chunk.choices?.[0]?.delta?.content ?? "";
        body.textContent = written;
        if (chunk.usage) this.tell(element, chunk.usage);
        this.messages.scrollTop = this.messages.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") this.line("error", error.message, "error");
    } finally {
      this.running = null;
      this.stop.disabled = true;
      if (written) this.said = [...said, { role: "assistant", content: written }];
    }
  }

  tell(element, usage) {
    const told = usage.windlass, note = document.createElement("span");
    note.className = "usage";
    note.textContent = `${usage.prompt_tokens} tokens read, ${usage.completion_tokens} written` +
      (told ? `, of ${told.seen} seen, ${told.kept} kept, ${told.evicted} evicted` : "");
    element.append(note);
  }
}

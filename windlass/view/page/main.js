// The page: a recording that is replayed, or the rows of a running server.

import { parseFile, fileOf } from "./wire.js";
import { Timeline } from "./state.js";
import { TextView } from "./text.js";
import { Grid, drawOverview } from "./grid.js";
import { drawDetail } from "./detail.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";

const at = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en");
const PLAY = 80; // milliseconds a frame

let timeline = null, isLatest = true, token = -1, playing = 0, waiting = false, server = null;

const text = new TextView(at("text"), (chosen) => {
  token = chosen;
  drawDetail(at("detail"), timeline.state, timeline.header, token);
});
const grid = new Grid(at("grid"), at("zoom"), () => {
  if (!timeline) return;
  legend();
  draw();
});

function units(bytes) {
  for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (bytes >= size) return `${(bytes / size).toFixed(2)} ${name}`;
  }
  return `${bytes} B`;
}

function fail(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

function numbers(state) {
  const { told } = state, list = at("numbers");
  const speed = timeline.speed();
  const rows = [
    ["tokens seen", count(told.seen)],
    ["kept, at most in a head", count(state.kept)],
    ["evicted", count(Math.max(0, told.seen - state.kept))],
    ["bytes held", units(told.bytes)],
    ["slots", units(state.formula[1])],
    ["", `= ${state.formula[0]}`],
    ["read by", told.mode],
    ["speed", speed === null ? "–" : `${count(Math.round(speed))} tokens/s`],
  ];
  if (server) {
    rows.push(["all rows", `${units(server.bytes_held)} of at most ${units(server.bytes_limit)}`]);
    rows.push(["rows in use", `${server.total_rows - server.free_rows} of ${server.total_rows}`]);
    rows.push(["queue", `${count(server.queued)} of ${count(server.queued_tokens)} tokens`]);
  }
  list.replaceChildren(...rows.flatMap(([name, value]) => {
    const term = document.createElement("dt"), told = document.createElement("dd");
    term.textContent = name;
    told.textContent = value;
    told.className = name ? "" : "wide";
    return name ? [term, told] : [told];
  }));
}

function colours(state) {
  const names = Object.keys(state.numbers), select = at("colour");
  at("colour-label").hidden = !names.length;
  if (select.options.length - 1 === names.length) return;
  select.replaceChildren(...["", ...names].map((name) => new Option(name || "what is held", name)));
  select.value = names.includes(grid.by) ? grid.by : "";
  grid.by = select.value;
}

function draw() {
  if (!timeline?.frames.length || waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    const last = timeline.frames.length - 1;
    let state;
    try {
      state = timeline.seek(isLatest ? last : Number(at("step").value));
    } catch (error) {
      return fail(`This frame cannot be shown: ${error.message}`);
    }
    const mask = grid.mask(state);
    text.show(state, timeline.header, mask, mask && grid.chosen);
    drawOverview(at("overview"), state, mask, text.visible);
    colours(state);
    grid.draw(state);
    const zoomed = grid.chosen !== null;
    at("zoom-box").hidden = !zoomed;
    if (zoomed) at("zoom-text").textContent = grid.drawZoom(state) ?? "";
    numbers(state);
    drawDetail(at("detail"), state, timeline.header, token);
    at("step").max = last;
    at("step").value = timeline.at;
    at("step").disabled = at("play").disabled = last === 0;
    const told = `step ${count(timeline.at + 1)} of ${count(last + 1)}, ${count(state.told.seen)} tokens`;
    at("step-text").textContent = told + (state.told.edited ? ", the text was edited" : "");
    at("step").setAttribute("aria-valuetext", told);
    document.body.dataset.step = timeline.at;
  });
}

function show(next, name) {
  stop();
  timeline = next;
  text.reset();
  token = -1;
  grid.chosen = null;
  const { header } = timeline;
  const budget = header.budget === null ? "no budget" : `budget ${count(header.budget)}, sinks ${header.sinks}, window ${header.window}`;
  at("about").textContent = [name, header.model, header.policy, budget, `store ${header.store}`,
    header.merge === "none" ? "" : `merge ${header.merge}`, header.recall ? `recall ${header.recall}` : ""].filter(Boolean).join(" · ");
  at("about").title = at("about").textContent;
  at("save").disabled = false;
  fail("");
  legend();
  draw();
}

function legend() {
  const box = at("legend");
  const part = (kind, words) => {
    const outer = document.createElement("span"), sample = document.createElement("span");
    sample.className = kind;
    sample.textContent = words;
    outer.append(sample);
    return outer;
  };
  const scale = document.createElement("span"), strip = document.createElement("span");
  strip.className = "scale";
  for (let level = 1; level <= 8; level++) {
    const each = document.createElement("i");
    each.className = `s${level}`;
    strip.append(each);
  }
  scale.append("held by few", strip, "by all kv heads");
  const { chosen } = grid;
  const held = chosen ? part("s8", `held by layer ${chosen.layer}, kv head ${chosen.head}`) : scale;
  const parts = [held, part("s0", chosen ? "not held" : "evicted")];
  if (timeline.header.budget !== null) parts.push(part("sink", "sinks"), part("window", "window"));
  if (timeline.header.recall) parts.push(part("recalled", "recalled by the newest step"));
  box.replaceChildren(...parts, part("back", "came back"));
}

function replay(bytes, name) {
  const { header, headerBytes, frames } = parseFile(bytes);
  const next = new Timeline(header, headerBytes);
  frames.forEach((frame) => next.add(frame));
  live?.stop();
  if (live) live.isWanted = false;
  server = null;
  isLatest = false;
  text.follows = false;
  at("state").textContent = "replay";
  at("row-label").hidden = true;
  at("step").value = 0;
  at("latest").hidden = !live;
  show(next, name);
}

function stop() {
  clearInterval(playing);
  playing = 0;
  at("play").textContent = "Play";
  at("play").setAttribute("aria-label", "Play");
}

at("play").addEventListener("click", () => {
  if (playing) return stop();
  isLatest = false;
  if (timeline.at >= timeline.frames.length - 1) at("step").value = 0;
  at("play").textContent = "Pause";
  at("play").setAttribute("aria-label", "Pause");
  playing = setInterval(() => {
    if (timeline.at >= timeline.frames.length - 1) return stop();
    at("step").value = timeline.at + 1;
    draw();
  }, PLAY);
});
at("step").addEventListener("input", () => {
  stop();
  isLatest = at("state").textContent === "live" && Number(at("step").value) >= timeline.frames.length - 1;
  at("latest").hidden = isLatest || !live;
  draw();
});
at("latest").addEventListener("click", () => {
  stop();
  isLatest = true;
  at("latest").hidden = true;
  if (!live.isWanted) {
    live.isWanted = true;
    live.start();
  } else draw();
});
at("colour").addEventListener("change", () => {
  grid.by = at("colour").value;
  draw();
});
at("overview").addEventListener("click", (event) => {
  if (timeline?.state.tokens) text.moveTo(Math.floor(event.offsetX / at("overview").clientWidth * timeline.state.tokens), true);
});
at("save").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(fileOf(timeline.headerBytes, timeline.frames));
  link.download = "windlass.view";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});
at("file").addEventListener("change", async () => {
  const [file] = at("file").files;
  at("file").value = "";
  if (!file) return;
  try {
    replay(new Uint8Array(await file.arrayBuffer()), file.name);
  } catch (error) {
    fail(`${file.name}: ${error.message}`);
  }
});
at("text").addEventListener("scroll", () => {
  if (timeline?.state.told && !waiting) drawOverview(at("overview"), timeline.state, grid.mask(timeline.state), text.visible);
});
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

const headers = () => at("key").value ? { Authorization: `Bearer ${at("key").value}` } : {};
const refused = () => {
  at("key-label").hidden = false;
  at("key").focus();
};

let live = null;
function follow() {
  at("chat").hidden = false;
  text.follows = true;
  const chat = new Chat(Object.fromEntries(["messages", "ask", "prompt", "stop", "clear"].map((id) => [id, at(id)])), headers, refused);
  const models = async () => {
    const answer = await fetch("v1/models", { headers: headers() });
    if (answer.ok) chat.model = (await answer.json()).data?.[0]?.id ?? "";
  };
  models().catch(() => {});
  live = new Live({
    headers,
    refused,
    begun: (next) => {
      isLatest = true;
      show(next, "");
    },
    grown: draw,
    state: (told) => at("state").textContent = told,
    status: (told) => {
      server = told;
      const select = at("row"), now = select.value;
      const rows = told.rows.map(({ number, phase, seen }) => new Option(`${number}: ${phase}, ${count(seen)} tokens`, number));
      if (now && !told.rows.some(({ number }) => String(number) === now)) rows.push(new Option(`${now}: over`, now));
      select.replaceChildren(new Option("newest", ""), ...rows);
      select.value = now;
      at("row-label").hidden = false;
      if (timeline?.state.told) numbers(timeline.state);
    },
  });
  at("row").addEventListener("change", () => {
    live.row = at("row").value;
    live.start();
  });
  at("key").addEventListener("change", () => {
    models().catch(() => {});
    live.start();
  });
  if (!document.hidden) live.start();
}

async function begin() {
  const mode = await fetch("view/mode", { cache: "no-store" }).then((answer) => answer.json());
  const name = new URLSearchParams(location.search).get("replay") ?? mode.replays[0] ?? null;
  at("state").textContent = "open a recording";
  if (mode.live) follow();
  if (name === null) return;
  try {
    const answer = await fetch(`view/replay/${encodeURIComponent(name)}`);
    if (!answer.ok) throw new Error(`the server has no recording of this name (${answer.status})`);
    replay(new Uint8Array(await answer.arrayBuffer()), name);
  } catch (error) {
    fail(`${name}: ${error.message}`);
  }
}
begin().catch((error) => fail(error.message));

// One token in the cache: its description, and the heads that hold it.

import { readAt } from "./state.js";
import { palette } from "./grid.js";

function row(list, name, value) {
  const term = document.createElement("dt"), told = document.createElement("dd");
  term.textContent = name;
  told.textContent = value;
  list.append(term, told);
}

function span(values) {
  const least = Math.min(...values), most = Math.max(...values);
  const shown = (value) => Number.isInteger(value) ? value.toLocaleString("en") : value.toPrecision(3);
  return least === most ? shown(least) : `${shown(least)} to ${shown(most)}`;
}

export function drawDetail(box, state, header, token) {
  box.replaceChildren();
  const hint = document.createElement("p");
  if (token < 0 || token >= state.tokens) {
    hint.textContent = "Point at a token, or go there with the arrow keys.";
    box.append(hint);
    return;
  }
  hint.className = "token";
  const text = state.strings[token];
  hint.textContent = text ? JSON.stringify(text) : text === "" ? "part of the character that ends later" : "not known";
  const list = document.createElement("dl");
  box.append(hint, list);
  const places = state.places(token);
  const heads = places.reduce((sum, { plane }) => sum + plane.heads.length, 0);
  row(list, "position, id", `${token.toLocaleString("en")}, ${state.ids[token] ?? "not known"}`);
  const isNew = token >= state.told.next;
  row(list, "held by", isNew ? "not read yet" : heads ? `${heads} of ${state.heads} kv heads` : "none: evicted");
  if (heads) {
    const reads = places.map(({ plane }) => readAt(state, header, plane, token)).filter((read) => read !== null);
    row(list, "stored at", token.toLocaleString("en"));
    if (reads.length) {
      row(list, `read at (${state.told.mode})`, span(reads.map(({ key }) => key)));
      row(list, "distance as read", span(reads.map(({ key, query }) => query - key)));
    } else row(list, "read by", state.told.mode);
    for (const [name, values] of Object.entries(state.numbers)) {
      const known = places.map(({ slot }) => values[slot]).filter((value) => !Number.isNaN(value));
      if (known.length) row(list, name === "merged" ? "merged into it" : name, span(known));
    }
  }
  if (!isNew && header.recall) {
    const readers = state.recalled.get(token) ?? [];
    row(list, "recalled by", `${readers.length} of ${state.heads} kv heads in the newest step`);
  }
  if (heads) box.append(matrix(state, places));
}

// Layers down, kv heads across: which of them hold it.
function matrix(state, places) {
  const all = state.allHeads(), colours = palette();
  const layers = [...new Set(all.map(({ layer }) => layer))];
  const heads = Math.max(...all.map(({ head }) => head)) + 1;
  const holders = new Set(places.flatMap(({ plane }) => plane.heads.map((head) => `${plane.layer},${head}`)));
  const size = layers.length > 12 ? 4 : 9, canvas = document.createElement("canvas");
  canvas.width = heads * (size + 1);
  canvas.height = layers.length * (size + 1);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `held in ${[...holders].map((own) => `layer ${own.replace(",", " head ")}`).join(", ")}`);
  const context = canvas.getContext("2d");
  for (const { layer, head } of all) {
    const [red, green, blue] = colours.levels[holders.has(`${layer},${head}`) ? 8 : 2];
    context.fillStyle = `rgb(${red}, ${green}, ${blue})`;
    context.fillRect(head * (size + 1), layers.indexOf(layer) * (size + 1), size, size);
  }
  return canvas;
}

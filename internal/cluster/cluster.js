// Asks for the tiles that have changed, and filters and groups them. page.js has what it shares with the
// page of a node.
"use strict";
const main = document.getElementById("nodes"), form = document.getElementById("filters"), shown = document.getElementById("shown");
const tiles = new Map([...main.querySelectorAll(".tile")].map(tile => [tile.dataset.name, tile]));
let grouped = "";

function matches(tile, words, state) {
  return (!state || tile.dataset.states.split(" ").includes(state)) && words.every(word => tile.dataset.find.includes(word));
}

// filter hides what is not looked for, and keeps that in the address.
function filter() {
  const { q, state, group } = form.elements, words = q.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const tile of tiles.values()) {
    const hide = !matches(tile, words, state.value);
    if (tile.hidden !== hide) tile.hidden = hide;
    if (!hide) count++;
  }
  for (const section of grouped ? main.children : []) section.hidden = !section.querySelector(".tile:not([hidden])");
  const text = `${count} of ${tiles.size} nodes`;
  if (shown.textContent !== text) shown.textContent = text;
  const query = new URLSearchParams();
  for (const field of [q, state, group]) if (field.value) query.set(field.name, field.value);
  const address = query.size ? "?" + query : location.pathname;
  if (location.search !== (query.size ? address : "")) history.replaceState(null, "", address);
}

// arrange puts the tiles in order, below a heading for each group.
function arrange() {
  const by = form.elements.group.value, groups = new Map();
  for (const name of [...tiles.keys()].sort()) {
    const group = by ? tiles.get(name).dataset[by].trim() || "none" : "";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(tiles.get(name));
  }
  const sections = [...groups.keys()].sort().map(group => {
    const section = document.createElement("section"), heading = document.createElement("h2"), grid = document.createElement("div");
    heading.textContent = `${group} · ${groups.get(group).length}`;
    heading.hidden = !by;
    grid.className = "tiles";
    grid.append(...groups.get(group));
    section.append(heading, grid);
    return section;
  });
  main.replaceChildren(...sections);
  grouped = by;
}

// take puts what has changed into the page.
function take(html, whole) {
  const answer = new DOMParser().parseFromString(html, "text/html"), fresh = answer.querySelectorAll(".tile");
  document.getElementById("head").replaceWith(answer.getElementById("head"));
  let moved = false;
  const remove = name => { tiles.get(name)?.remove(); moved = tiles.delete(name) || moved; };
  if (whole) {
    const names = new Set([...fresh].map(tile => tile.dataset.name));
    [...tiles.keys()].filter(name => !names.has(name)).forEach(remove);
  }
  // A node that is gone and has come back has a tile as well.
  answer.querySelectorAll("[data-gone]").forEach(gone => remove(gone.dataset.gone));
  for (const tile of fresh) {
    const name = tile.dataset.name, old = tiles.get(name);
    if (old && old.outerHTML === tile.outerHTML) continue;
    moved = moved || !old || grouped && old.dataset[grouped] !== tile.dataset[grouped];
    const focused = old && old.contains(document.activeElement);
    tile.hidden = old ? old.hidden : false;
    if (old) old.replaceWith(tile);
    tiles.set(name, tile);
    if (focused) tile.querySelector("a").focus({ preventScroll: true });
  }
  if (moved) arrange();
  filter();
}

async function askTiles() {
  const answer = await ask("tiles?since=" + document.getElementById("head").dataset.version);
  if (answer.status === 204) return;
  const html = await answer.text();
  performance.mark("take");
  take(html, answer.headers.get("Virgate-Whole") === "true");
  performance.measure("take", "take");
}

for (const [name, value] of new URLSearchParams(location.search)) if (form.elements[name]) form.elements[name].value = value;
form.hidden = false;
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", () => { if (form.elements.group.value !== grouped) arrange(); filter(); });
if (form.elements.group.value) arrange();
filter();
keep(2000, askTiles);

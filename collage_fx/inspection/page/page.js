"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const all = (selector, from = document) => Array.from(from.querySelectorAll(selector));
const one = (id) => document.getElementById(id);

// Tabs.
const tabs = all('[role="tab"]');
function show(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    one(other.getAttribute("aria-controls")).hidden = !chosen;
  }
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    const next = tabs[(i + way + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
});

// Themes.
const themes = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try { theme = localStorage.getItem("collage_fx-theme") || theme; } catch { /* a file may have none */ }
function paint() {
  const dark = theme === "dark" || (theme === "system" && system.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  one("theme").textContent = "theme: " + theme;
}
one("theme").addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  try { localStorage.setItem("collage_fx-theme", theme); } catch { /* as above */ }
  paint();
});
system.addEventListener("change", paint);
paint();

// States. A row of the data: class, kind, verdict, reason, its layers, its shapes.
const { layers, rows } = data.states;
const MOST = 300;
function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function shapesOf(row) {
  return row[5].flatMap(([shape, count]) => Array(count).fill(shape));
}
function listOf(row, words) {
  const list = element("ul");
  const shapes = shapesOf(row);
  let left = 0;
  row[4].forEach((layer, i) => {
    if (words && !fits(layers[layer], words)) return;
    if (list.children.length < MOST) {
      const item = element("li", layers[layer] + " ");
      item.append(element("span", shapes[i], "about"));
      list.append(item);
    } else left += 1;
  });
  if (left) list.append(element("li", `and ${left} more: search for them`, "about"));
  return list;
}
function open(tr, words) {
  close(tr);
  const cell = element("td");
  cell.colSpan = 9;
  cell.append(listOf(rows[tr.dataset.row], words));
  const members = element("tr", undefined, "members");
  members.append(cell);
  tr.after(members);
  tr.querySelector(".more")?.setAttribute("aria-expanded", "true");
}
function close(tr) {
  if (tr.nextElementSibling?.classList.contains("members")) tr.nextElementSibling.remove();
  tr.querySelector(".more")?.setAttribute("aria-expanded", "false");
}
const trs = all("tr[data-row]");
for (const tr of trs) {
  tr.querySelector(".more")?.addEventListener("click", (event) => {
    if (event.target.getAttribute("aria-expanded") === "true") close(tr);
    else open(tr, wordsOfSearch());
  });
}
function wordsOfSearch() {
  return one("search").value.toLowerCase().split(/\s+/).filter(Boolean);
}
const fits = (text, words) => words.every((word) => text.toLowerCase().includes(word));
// A search finds rows by what they say, and layers by their names; words may be in either.
function search() {
  const words = wordsOfSearch();
  let found = 0;
  for (const tr of trs) {
    const row = rows[tr.dataset.row];
    const said = tr.textContent;
    const left = words.filter((word) => !said.toLowerCase().includes(word));
    const matching = row[4].filter((layer) => fits(layers[layer], left)).length;
    tr.hidden = words.length > 0 && !matching;
    close(tr);
    if (tr.hidden) continue;
    found += matching;
    if (left.length) open(tr, left);
  }
  for (const group of all("details.class", one("classes"))) {
    group.hidden = all("tr[data-row]", group).every((tr) => tr.hidden);
  }
  one("found").textContent = words.length ? `${found} ${found === 1 ? "state" : "states"} found` : "";
  if (!one("layers").hidden) listLayers(words);
}
let timer;
one("search").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(search, 80);
});
function listLayers(words) {
  const of = layers.map(() => []);
  rows.forEach((row) => {
    const shapes = shapesOf(row);
    row[4].forEach((layer, i) => of[layer].push([row, shapes[i]]));
  });
  const table = element("table");
  const body = element("tbody");
  let shown = 0;
  let left = 0;
  of.forEach((states, layer) => {
    const said = layers[layer] + " " + states.map(([row]) => row.slice(1, 4).join(" ")).join(" ");
    if (!fits(said, words)) return;
    if (shown >= MOST) { left += 1; return; }
    shown += 1;
    const tr = element("tr");
    const name = element("th", layers[layer] || "–");
    name.scope = "row";
    const cell = element("td");
    for (const [row] of states) {
      const chip = element("span", row[1], "verdict " + row[2]);
      chip.title = `${row[2]}: ${row[3]}`;
      cell.append(chip);
    }
    tr.append(name, element("td", states[0][1], "about"), cell);
    body.append(tr);
  });
  table.append(body);
  const box = element("details", undefined, "class");
  box.open = true;
  box.append(element("summary", `${shown + left} ${shown + left === 1 ? "layer" : "layers"}`));
  box.append(table);
  if (left) box.append(element("p", `and ${left} more: search for them`, "empty"));
  one("layers").replaceChildren(box);
}
function order(byLayer) {
  one("by-class").setAttribute("aria-pressed", !byLayer);
  one("by-layer").setAttribute("aria-pressed", byLayer);
  one("classes").hidden = byLayer;
  one("layers").hidden = !byLayer;
  if (byLayer) listLayers(wordsOfSearch());
}
one("by-class").addEventListener("click", () => order(false));
one("by-layer").addEventListener("click", () => order(true));

// Graphs: what a value stems from and becomes.
const NAMES = { b: "before", e: "expanded", l: "lowered" };
const above = {};
const below = {};
for (const links of Object.values(data.links)) {
  for (const [value, stems] of Object.entries(links)) {
    above[value] = stems;
    for (const stem of stems) (below[stem] ||= []).push(value);
  }
}
function reach(start, links) {
  const found = new Set([start]);
  for (const value of found) for (const next of links[value] || []) found.add(next);
  return found;
}
let pinned = null;
let marked = [];
function unmark() {
  for (const span of marked) span.classList.remove("on", "at");
  marked = [];
}
function sort(value) {
  return NAMES[/^\d+([a-z])/.exec(value)[1]] || "kernel";
}
function mark(span, scroll) {
  unmark();
  const value = span.dataset.v;
  const view = span.closest(".view");
  const related = new Set([...reach(value, above), ...reach(value, below)]);
  const here = span.closest(".code");
  const counts = { before: new Set(), expanded: new Set(), lowered: new Set() };
  for (const other of all("[data-v]", view)) {
    const id = other.dataset.v;
    if (!related.has(id)) continue;
    other.classList.add(id === value ? "at" : "on");
    marked.push(other);
    counts[sort(id)]?.add(id);
    const line = other.closest(".store");
    if (line && !line.classList.contains("on")) {
      line.classList.add("on");
      marked.push(line);
    }
  }
  for (const pane of all(".code", view)) {
    const first = pane.querySelector(".line.on") || pane.querySelector(".at, .on");
    if (!scroll || pane === here || !first || !pane.offsetParent) continue;
    const box = first.getBoundingClientRect();
    const frame = pane.getBoundingClientRect();
    if (box.top < frame.top || box.bottom > frame.bottom) {
      pane.scrollTop += box.top - frame.top - frame.height / 3;
    }
  }
  tell(span, counts, view);
}
function tell(span, counts, view) {
  const stores = all(".language:not([hidden]) .line.store.on", view).map((line) => {
    const number = line.querySelector(".number").textContent;
    return `line ${number} ${line.querySelector(".stores").textContent}`;
  });
  const parts = Object.entries(counts).filter(([, ids]) => ids.size);
  const values = parts.map(([name, ids]) => `${ids.size} ${name}`).join(", ");
  const text = span.textContent.length > 40 ? span.textContent.slice(0, 40) + "…" : span.textContent;
  const ends = stores.length ? `; ${stores.join(", ")}` : "";
  one("where").textContent = `${text}: ${values}${ends}${pinned ? " (kept; Escape takes it away)" : ""}`;
}
for (const view of all(".view")) {
  const value = (event) => event.target.closest?.("[data-v]");
  view.addEventListener("mouseover", (event) => {
    const span = value(event);
    if (span && !pinned) mark(span, true);
  });
  view.addEventListener("mouseleave", () => { if (!pinned) unmark(); });
  view.addEventListener("click", (event) => {
    const span = value(event);
    pinned = span && pinned !== span ? span : null;
    if (span) mark(span, true);
    else unmark();
  });
  view.addEventListener("focusin", (event) => {
    const span = value(event);
    if (span && !pinned) mark(span, true);
  });
  // Each column is one stop of Tab; arrows go from value to value in it.
  for (const column of all(".columns .code", view)) {
    const names = all(".def", column);
    if (names.length) names[0].tabIndex = 0;
    column.addEventListener("keydown", (event) => {
      const at = names.indexOf(document.activeElement);
      const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (at < 0) return;
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        names[at].click();
      } else if (way && names[at + way]) {
        event.preventDefault();
        names[at].tabIndex = -1;
        names[at + way].tabIndex = 0;
        names[at + way].focus();
      }
    });
  }
  const languages = all(".languages button", view);
  for (const button of languages) {
    button.addEventListener("click", () => {
      for (const other of languages) other.setAttribute("aria-pressed", other === button);
      for (const text of all(".language", view)) {
        text.hidden = text.dataset.language !== button.dataset.language;
      }
    });
  }
}
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  pinned = null;
  unmark();
});
function showClass(number) {
  pinned = null;
  unmark();
  for (const view of all(".view")) view.hidden = view.dataset.class !== number;
}
one("class")?.addEventListener("change", (event) => showClass(event.target.value));
for (const button of all(".link")) {
  button.addEventListener("click", (event) => {
    event.preventDefault();
    one("class").value = button.dataset.class;
    showClass(button.dataset.class);
    show(one("tab-graphs"));
  });
}

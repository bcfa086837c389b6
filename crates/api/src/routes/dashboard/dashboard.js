"use strict";
// Whatever comes from the API is put on the page as text, never as markup.
const TIERS = ["hot", "hibernated", "parked", "archived", "stopped"];
const COLUMNS = [
  ["name", "Name", p => p.name],
  ["tier", "Tier", p => TIERS.indexOf(p.tier ?? "stopped")],
  ["state", "State", p => outcome(p)],
  ["ports", "Ports", p => p.ports.length ? p.ports[0].host_port ?? p.ports[0].port : -1],
  ["memory", "Memory", p => p.memory.pss_bytes, "number"],
  ["idle", "Idle", p => p.idle_ms ?? -1, "number"],
  ["wakes", "Wakes", p => p.wakes, "number"],
  ["last", "Last wake", p => p.last_wake ? p.last_wake.total_us : -1, "number"],
  ["command", "Command", p => p.spec.command.join(" ")],
];
const at = id => document.getElementById(id);
const state = { procs: [], sort: "name", down: false, one: null, why: null, events: [], last: 0, token: sessionStorage.getItem("kip-token") };

function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return `${n >= 100 || unit === "B" ? Math.round(n) : n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
}
function micros(us) {
  return us < 1000 ? `${us} us` : us < 1e6 ? `${(us / 1e3).toFixed(us < 1e4 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(2)} s`;
}
function span(ms) {
  const s = Math.round(ms / 1000);
  return s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min` : s < 86400 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
}
function element(name, text, ...classes) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  made.classList.add(...classes);
  return made;
}
function svg(name, attributes, ...classes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.classList.add(...classes);
  return made;
}

// What became of it: a proc that does not run says how its program ended.
function outcome(p) {
  if (p.exit === null || (p.state !== "stopped" && p.state !== "restarting")) return p.state;
  if (p.state !== "stopped") return `${p.state}, ${p.exit}`;
  return failed(p) ? `failed, ${p.exit.replace("exit code", "code")}` : "exited, code 0";
}
const failed = p => p.exit !== null && p.exit_code !== 0;
const ports = p => p.ports.map(({ proto, port, host_addr, host_port }) => {
  const where = host_port === null ? "" : `${host_addr === "0.0.0.0" || host_addr === "::" ? "" : `${host_addr}:`}${host_port}→`;
  return `${where}${port}/${proto}`;
});
const place = name => `#proc/${encodeURIComponent(name)}`;
function named() {
  const place = /^#proc\/(.+)$/.exec(location.hash);
  try { return place && decodeURIComponent(place[1]); } catch { return null; }
}

class Refused extends Error {}

async function ask(path, options = {}) {
  const headers = state.token ? { authorization: `Bearer ${state.token}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", ...options });
  if (answer.status === 401 || answer.status === 403) throw new Refused((await answer.json()).message);
  if (!answer.ok) throw new Error((await answer.json()).message);
  return answer;
}
const read = async path => (await ask(path)).json();

function trouble(text) {
  at("trouble").hidden = !text;
  at("trouble").textContent = text ?? "";
}

function totals(now) {
  const cards = TIERS.filter(tier => tier !== "stopped" || now.stopped).map(tier => [tier, now[tier], `--${tier}`]);
  cards.push(["memory held", bytes(now.held_bytes), "--held"], ["memory saved", bytes(now.saved_bytes), "--saved"]);
  at("totals").replaceChildren(...cards.map(([label, value, colour]) => {
    const card = element("div");
    card.dataset.total = label;
    card.append(element("b", value), element("span", label));
    card.style.setProperty("--colour", `var(${colour})`);
    return card;
  }));
}

const HIGH = 160, LEFT = 60, BELOW = 18, ABOVE = 8;
function frame(where, samples, most, label) {
  // In pixels, so that words are not stretched.
  const WIDE = Math.max(at(where).clientWidth, 200);
  const begin = samples[0].at_ms, end = Math.max(samples.at(-1).at_ms, begin + 1);
  const x = ms => LEFT + (ms - begin) / (end - begin) * (WIDE - LEFT - 8);
  const y = n => HIGH - BELOW - n / Math.max(most, 1) * (HIGH - BELOW - ABOVE);
  const chart = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img" });
  const text = (x, y, words, anchor) => {
    const made = svg("text", { x, y, "text-anchor": anchor });
    made.textContent = words;
    chart.append(made);
  };
  const finish = () => {
    text(LEFT - 6, y(most) + 8, label(most), "end");
    text(LEFT - 6, y(0), label(0), "end");
    text(LEFT, HIGH - 4, `${span(end - begin)} ago`, "start");
    text(WIDE - 8, HIGH - 4, "now", "end");
    return chart;
  };
  return { chart, x, y, finish };
}
function legend(where, names) {
  at(where).replaceChildren(...names.map(name => {
    const one = element("span");
    one.append(element("i", undefined, name), name);
    return one;
  }));
}
function draw(history) {
  // One look is no line: it counts from when it was made on.
  const samples = history.samples.length > 1 ? history.samples : [{ ...history.samples[0], at_ms: history.samples[0].at_ms - 1000 }, history.samples[0]];
  const now = samples.at(-1);
  totals(now);
  const sum = s => TIERS.reduce((all, tier) => all + s[tier], 0);
  const most = Math.max(1, ...samples.map(sum));
  const tiers = frame("tiers", samples, most, n => n);
  const below = samples.map(() => 0);
  for (const tier of TIERS) {
    const low = below.map((n, i) => [tiers.x(samples[i].at_ms), tiers.y(n)]);
    samples.forEach((s, i) => { below[i] += s[tier]; });
    const high = below.map((n, i) => [tiers.x(samples[i].at_ms), tiers.y(n)]);
    const path = svg("path", { d: `M${[...high, ...low.reverse()].map(p => p.map(n => n.toFixed(1)).join(" ")).join("L")}Z` }, tier);
    path.dataset.now = now[tier];
    tiers.chart.append(path);
  }
  at("tiers").replaceChildren(tiers.finish());
  legend("tiers-legend", TIERS);
  const memory = frame("memory", samples, Math.max(1, ...samples.flatMap(s => [s.held_bytes, s.saved_bytes])), bytes);
  for (const [of, key] of [["held", "held_bytes"], ["saved", "saved_bytes"]]) {
    const d = `M${samples.map(s => `${memory.x(s.at_ms).toFixed(1)} ${memory.y(s[key]).toFixed(1)}`).join("L")}`;
    memory.chart.append(svg("path", { d, "vector-effect": "non-scaling-stroke" }, `${of}-line`));
  }
  at("memory").replaceChildren(memory.finish());
  legend("memory-legend", ["held", "saved"]);
}

function heads() {
  at("procs").tHead.rows[0].replaceChildren(...COLUMNS.map(([key, title, , kind]) => {
    const head = element("th", undefined, `of-${key}`, ...(kind ? [kind] : []));
    head.scope = "col";
    if (state.sort === key) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    const button = element("button", title + (state.sort === key ? state.down ? " ↓" : " ↑" : ""));
    button.type = "button";
    button.dataset.sort = key;
    button.addEventListener("click", () => {
      state.down = state.sort === key && !state.down;
      state.sort = key;
      table();
    });
    head.append(button);
    return head;
  }));
}
function row(p) {
  const made = element("tr");
  made.dataset.proc = p.name;
  if (p.name === state.one) made.setAttribute("aria-current", "true");
  const link = element("a", p.name);
  link.href = place(p.name);
  link.dataset.link = p.name;
  const tier = element("td");
  tier.append(element("i", undefined, "tier", p.tier ?? "stopped"), p.tier ?? "none");
  const words = { state: outcome(p), ports: ports(p).join(", "), command: p.spec.command.join(" ") };
  const cells = {
    name: element("td"), tier, state: element("td", words.state, ...(failed(p) ? ["failed"] : [])), ports: element("td", words.ports || "–"),
    memory: element("td", p.pids.length ? bytes(p.memory.pss_bytes) : "–"), idle: element("td", p.idle_ms === null ? "–" : span(p.idle_ms)),
    wakes: element("td", p.wakes), last: element("td", p.last_wake ? `${micros(p.last_wake.total_us)} from ${p.last_wake.from}` : "–"),
    command: element("td", words.command),
  };
  cells.name.append(link);
  for (const [key, , , kind] of COLUMNS) cells[key].classList.add(`of-${key}`, ...(kind ? [kind] : []));
  for (const [key, text] of Object.entries(words)) cells[key].title = text;
  made.append(...COLUMNS.map(([key]) => cells[key]));
  // The whole row leads where its link does; what is selected with the mouse stays selected.
  made.addEventListener("click", e => { if (!e.target.closest("a") && !String(getSelection())) link.click(); });
  return made;
}
function choices(id, words) {
  const list = at(id), chosen = list.value;
  const all = ["", ...words];
  if (all.join() === [...list.options].map(o => o.value).join()) return;
  list.replaceChildren(...all.map(word => Object.assign(element("option", word || "all"), { value: word })));
  list.value = all.includes(chosen) ? chosen : "";
}
function wanted(p) {
  const [tier, name] = [at("by-tier").value, at("by-state").value];
  const labels = Object.entries(p.spec.labels ?? {}).map(([key, value]) => `${key}=${value}`);
  const text = [p.name, p.spec.command.join(" "), ...ports(p), ...labels, outcome(p)].join("\n").toLowerCase();
  const words = at("search").value.toLowerCase().split(/\s+/);
  return (!tier || (p.tier ?? "none") === tier) && (!name || p.state === name) && words.every(word => text.includes(word));
}
function table() {
  // What has the focus keeps it although all is drawn anew.
  const { link, sort } = document.activeElement?.dataset ?? {};
  heads();
  choices("by-tier", [...TIERS.slice(0, -1), "none"].filter(tier => state.procs.some(p => (p.tier ?? "none") === tier)));
  choices("by-state", [...new Set(state.procs.map(p => p.state))].sort());
  const value = COLUMNS.find(([key]) => key === state.sort)[2];
  const found = state.procs.filter(wanted);
  found.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return (x < y ? -1 : x > y ? 1 : a.name < b.name ? -1 : 1) * (state.down ? -1 : 1);
  });
  at("procs").tBodies[0].replaceChildren(...found.map(row));
  at("procs").hidden = at("find").hidden = !state.procs.length;
  at("none").hidden = state.procs.length > 0;
  at("not-found").hidden = found.length > 0 || !state.procs.length;
  at("found").textContent = found.length === state.procs.length ? `${found.length}` : `${found.length} of ${state.procs.length}`;
  if (link) document.querySelector(`[data-link="${CSS.escape(link)}"]`)?.focus({ preventScroll: true });
  if (sort) document.querySelector(`[data-sort="${sort}"]`)?.focus({ preventScroll: true });
}

function waterfall(wake) {
  const parts = [];
  const all = Math.max(wake.total_us, wake.steps.reduce((sum, step) => sum + step.us, 0), 1);
  let begun = 0;
  for (const { name, us } of wake.steps) {
    const bar = svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none" });
    bar.append(svg("rect", { x: begun / all * 1000, y: 0, width: Math.max(us / all * 1000, 2), height: 10 }, "step"));
    begun += us;
    const time = element("span", micros(us));
    time.dataset.us = us;
    time.dataset.step = name;
    parts.push(element("span", name), bar, time);
  }
  return parts;
}
// Shows the proc that the address names.
function open() {
  const before = state.one;
  state.one = named();
  state.why = null;
  at("why").replaceChildren();
  at("one-logs").replaceChildren();
  table();
  one();
  if (!at("one").hidden) {
    at("one").scrollIntoView({ block: "start" });
    at("one-name").focus({ preventScroll: true });
  } else if (before) {
    document.querySelector(`[data-link="${CSS.escape(before)}"]`)?.focus();
  }
}
function close() {
  history.pushState(null, "", location.pathname);
  open();
}
function facts(p) {
  const lines = [
    ["Ports", ports(p).join(", ")], ["Memory", p.pids.length ? bytes(p.memory.pss_bytes) : ""], ["Ended with", p.exit],
    ["Started", p.started_at_ms && new Date(p.started_at_ms).toLocaleString()], ["Started again", p.restarts ? `${p.restarts} times by its restart policy` : ""],
    ["Starts again in", p.next_start_ms != null ? span(p.next_start_ms) : ""], ["Wakes", p.wakes || ""], ["Idle for", p.idle_ms === null ? "" : span(p.idle_ms)],
    ["Ready", p.ready == null ? "" : p.ready ? "yes" : "no"],
    ["Labels", Object.entries(p.spec.labels ?? {}).map(([key, value]) => value ? `${key}=${value}` : key).join(", ")],
  ];
  return lines.filter(([, value]) => value).flatMap(([title, value]) => [element("dt", title), element("dd", value)]);
}
// Why a proc without lines of its own is as it is.
function plainly(p) {
  if (p.state === "stopped") return `it does not run; kip start ${p.name} starts it`;
  if (p.state === "restarting") return "it is started again by its restart policy";
  if (p.tier === "hot") return "nothing keeps it awake";
  return p.tier ? "it sleeps until a packet or a call comes" : `it is ${p.state}`;
}
async function logs(p) {
  const lines = (await (await ask(`/v1/procs/${encodeURIComponent(p.name)}/logs?tail=30`)).text()).split("\n").filter(Boolean).map(line => JSON.parse(line));
  if (state.one !== p.name) return;
  const said = lines.filter(line => line.text !== undefined).map(line => element("span", `${line.text}\n`, line.stream));
  const box = at("one-logs"), low = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  box.replaceChildren(...(said.length ? said : [element("span", "It has written nothing.", "empty")]));
  if (low) box.scrollTop = box.scrollHeight;
}
async function one() {
  const name = state.one;
  const p = state.procs.find(p => p.name === name);
  at("one").hidden = !p;
  if (!p) return;
  at("one-name").textContent = p.name;
  at("one-state").replaceChildren(element("i", undefined, "tier", p.tier ?? "stopped"), `${outcome(p)}${p.tier && p.tier !== p.state ? `, ${p.tier}` : ""}`);
  at("one-command").textContent = p.spec.command.join(" ");
  at("one-facts").replaceChildren(...facts(p));
  logs(p).catch(e => at("one-logs").replaceChildren(element("span", e.message, "empty")));
  const wake = p.last_wake;
  at("wake").textContent = wake ? `${micros(wake.total_us)} from ${wake.from}, for ${wake.trigger}, ${span(Date.now() - wake.at_ms)} ago` : "It has not slept and woken yet.";
  at("waterfall").replaceChildren(...(wake ? waterfall(wake) : []));
  const slept = p.last_sleep;
  at("slept").textContent = slept ? `to ${slept.to}, frozen ${micros(slept.frozen_us)} of ${micros(slept.total_us)}, ${bytes(slept.bytes_written)} written, ${span(Date.now() - slept.at_ms)} ago` : "It has not slept yet.";
  const mine = state.events.filter(e => e.name === name).slice(-50).reverse();
  at("one-events").replaceChildren(...mine.map(e => element("li", `${new Date(e.at_ms).toLocaleTimeString()} ${e.kind} ${e.detail}`)));
  if (state.why !== `${name} ${p.state} ${p.wakes}`) {
    // Once for each change: the look at one that runs takes a second.
    state.why = `${name} ${p.state} ${p.wakes}`;
    at("why").replaceChildren(element("li", "looking ..."));
    try {
      const why = await read(`/v1/procs/${encodeURIComponent(name)}/why`);
      if (state.one !== name) return;
      const lines = [...why.awake_because, ...why.cannot_sleep.map(line => `cannot sleep: ${line}`)];
      if (why.next_wake) lines.push(`its next wake is by ${why.next_wake.kind}, in ${span(why.next_wake.due_ms)}`);
      if (!lines.length) lines.push(plainly(p));
      at("why").replaceChildren(...lines.map(line => element("li", line)));
    } catch (e) {
      at("why").replaceChildren(element("li", e.message));
    }
  }
}

let asked = false, again = false;
async function refresh() {
  // One at a time, and once more for what came meanwhile.
  if (asked) { again = true; return; }
  asked = true;
  try {
    const [info, procs, history] = await Promise.all([read("/v1/info"), read("/v1/procs"), read("/v1/history")]);
    state.procs = procs;
    at("about").textContent = `${info.version} on ${info.worker}, ${info.data}; ${info.wakes_last_minute} wakes in the last minute`;
    at("main").hidden = false;
    at("login").hidden = true;
    draw(history);
    const first = at("one").hidden && state.one;
    table();
    one();
    if (first && !at("one").hidden) at("one").scrollIntoView();
    trouble();
  } catch (e) {
    if (e instanceof Refused) return login(e.message);
    trouble(`${e.message}: trying again`);
  } finally {
    asked = false;
    if (again) { again = false; setTimeout(refresh, 100); }
  }
}

async function follow() {
  for (;;) {
    try {
      const answer = await ask(`/v1/events?follow=true&since=${state.last}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        text += value;
        const lines = text.split("\n");
        text = lines.pop();
        for (const line of lines.filter(Boolean)) {
          const event = JSON.parse(line);
          if (!event.kind) continue;
          state.last = event.id;
          state.events.push(event);
        }
        state.events.splice(0, state.events.length - 2000);
        refresh();
      }
      trouble("the daemon has ended the connection: trying again");
    } catch (e) {
      if (e instanceof Refused) return;
      trouble(`no connection to the daemon (${e.message}): trying again`);
    }
    await new Promise(done => setTimeout(done, 1000));
  }
}

function login(message) {
  at("main").hidden = true;
  at("login").hidden = false;
  at("refused").textContent = state.token ? message : "";
  sessionStorage.removeItem("kip-token");
  state.token = null;
  at("token").focus();
}
function begin() {
  refresh().then(() => {
    if (!at("main").hidden) follow();
    // The daemon could not be asked, and the page says so; a user who has to give a token begins by
    // that.
    else if (at("login").hidden) setTimeout(begin, 1000);
  });
}
document.addEventListener("DOMContentLoaded", () => {
  at("login").addEventListener("submit", e => {
    e.preventDefault();
    state.token = at("token").value.trim();
    sessionStorage.setItem("kip-token", state.token);
    at("token").value = "";
    begin();
  });
  at("find").addEventListener("submit", e => e.preventDefault());
  for (const id of ["search", "by-tier", "by-state"]) at(id).addEventListener("input", table);
  addEventListener("hashchange", open);
  addEventListener("popstate", () => { if (named() !== state.one) open(); });
  at("close").addEventListener("click", close);
  addEventListener("keydown", e => { if (e.key === "Escape" && state.one) close(); });
  state.one = named();
  addEventListener("resize", () => { if (!at("main").hidden) refresh(); });
  setInterval(() => { if (!at("main").hidden) refresh(); }, 10000);
  begin();
});

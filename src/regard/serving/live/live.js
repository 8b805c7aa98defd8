// The live page: a question, the answer as it is written, and below it the page's own front end with the server behind it.

import { element } from "../../views/html/page_dom.js";
import { render } from "../../views/html/page.js";
import { kernelReader } from "../../views/widget/kernel_weights.js";
import { asker } from "../../views/widget/questions.js";
import { serverOf } from "./live_answer.js";

const part = (id) => document.getElementById(id);
const root = part("regard");
const server = serverOf(() => part("token").value || sessionStorage.getItem("token"));
let models = [], edits = [], view = null, questions = null, running = null, link = "", given = null;

const chosen = (id) => models.find((one) => one.id === part(id).value);
const modelOf = ({ model }) => models.find(({ id }) => id === model);
const isTranslator = (model) => model?.task === "translation";

async function begin() {
  try {
    models = (await (await server.ask("/v1/models")).json()).data;
  } catch (error) {
    part("key").hidden = error.status !== 401;
    say(error.status === 401 ? "This server wants its token." : error.message);
    return;
  }
  if (part("token").value) sessionStorage.setItem("token", part("token").value);
  part("key").hidden = true;
  part("model").replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
  part("other").replaceChildren(element("option", { value: "" }, "none"), ...models.map(({ id }) => element("option", { value: id }, id)));
  part("several").hidden = models.length < 2;
  choose();
}

/** The words of the page for a translator, and for a model that continues texts. */
const TRANSLATING = { go: "Translate", given: "Text to translate", said: "Translation", during: "translates", cut: "The translation was cut off by the limit of tokens.",
  advice: "Type a text and press Enter: its translation comes as it is written, and below it the attention of every layer and head." };
const WRITING = { go: "Continue", given: "Text to continue", said: "Continuation", during: "writes", cut: "",
  advice: "Type the beginning of a text and press Enter: its continuation comes as it is written, and below it the attention of every layer and head to the text." };
const wordsOf = (model) => (isTranslator(model) ? TRANSLATING : WRITING);

/** The name of a language in English; a code that is none of a language stays. */
function languageName(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(code);
  } catch {
    return code;
  }
}

const subjectOf = ({ id, languages }) => (languages && !languages.includes("und") ? languages.map(languageName).join(" to ") : id);

const isExample = (text) => models.some(({ examples }) => examples.includes(text));

function choose() {
  const model = chosen("model"), words = wordsOf(model), mine = part("text").value;
  part("title").textContent = `${subjectOf(model)}: ${words.go.toLowerCase()} a text, and see what the model looks at`;
  document.title = `${subjectOf(model)} · regard`;
  part("beginning").hidden = !isTranslator(model);
  part("length").hidden = isTranslator(model);
  for (const id of ["go", "given"]) part(id).textContent = words[id];
  part("try").hidden = !model.examples.length;
  part("examples").replaceChildren(...model.examples.map((text) => element("button", { type: "button", dir: "auto", onclick: () => {
    part("text").value = text;
    part("prefix").value = "";
    answer();
  } }, text)));
  running?.abort();
  part("texts").replaceChildren();
  clear();
  part("prefix").value = "";
  edits = [];
  drawEdits();
  say(words.advice);
  // The page begins with an answer: no stranger knows of an empty one what it is for.
  if (!mine.trim() || isExample(mine)) part("text").value = model.examples[0] ?? "";
  if (part("text").value) answer();
}

/** Show no attention: that of another text is none of this one's. */
function clear() {
  view?.remove();
  view = null;
  root.hidden = part("heads").hidden = true;
}

const say = (text) => { part("status").textContent = text; };

/** The questions of the form: the model's, with edited heads, and another model's. */
function asked() {
  const one = {
    text: part("text").value, model: part("model").value, prefix: isTranslator(chosen("model")) ? part("prefix").value : "",
    temperature: Number(part("temperature").value) || 0, ...(isTranslator(chosen("model")) ? {} : { max_tokens: Number(part("most").value) || 1 }),
  };
  const other = chosen("other"), found = [one];
  if (edits.length) found.push({ ...one, edits });
  if (other) found.push({ ...one, model: other.id, prefix: isTranslator(other) ? part("prefix").value : "" });
  return found;
}

async function answer() {
  running?.abort();
  const mine = (running = new AbortController());
  part("stop").disabled = false;
  const all = asked(), cards = all.map((one) => cardOf(one));
  part("texts").replaceChildren(...cards.map(({ card }) => card));
  try {
    const subjects = [];
    for (const [at, one] of all.entries()) {
      say(`${one.model} ${wordsOf(modelOf(one)).during} …`);
      // All are drawn with the seed of the first: a change of the text is then one of the head or of the model.
      if (at) one.seed = cards[0].done.seed;
      const done = await server.answer(one, (text) => { cards[at].said.textContent += text; }, mine.signal);
      cards[at].said.textContent = done.text;
      Object.assign(cards[at], { done });
      subjects.push({ text: one.text, model: one.model, tokens: done.tokens, edits: one.edits ?? [] });
    }
    await look(subjects, mine.signal);
    cards.forEach((card, at) => fillTokens(card, all[at], given.examples[at]));
    say(cards.map(({ done }, at) => noteOn(done, wordsOf(modelOf(all[at])))).find(Boolean) ?? "");
  } catch (error) {
    if (mine !== running) return;
    clear();
    if (error.name === "AbortError") say("Stopped.");
    else if (error.status === 401) await begin();
    else say(error.message);
  } finally {
    if (mine === running) part("stop").disabled = true;
  }
}

const noteOn = ({ text, is_cut }, { said, cut }) => (text ? (is_cut ? cut : "") : `The ${said.toLowerCase()} is empty: the model wrote its end at once.`);

function cardOf(one) {
  const said = element("p", { dir: "auto" }), { model, edits: changed } = one;
  const title = `${wordsOf(modelOf(one)).said} by ${model}${changed?.length ? `, with ${changed.map(nameOf).join(", ")}` : ""}`;
  const tokens = element("div", { class: "written" });
  return { card: element("section", { class: "said", "aria-label": title }, element("h2", {}, title), said, tokens), said, tokens };
}

/** The tokens of a translation as buttons, each with the words that were likeliest in its place. */
function fillTokens({ tokens, done }, question, example) {
  const map = example.maps.find(({ alternatives }) => alternatives !== null);
  if (!map) return;
  const others = example.alternatives[map.alternatives], labels = example.labels[map.rows].texts;
  tokens.before(element("small", { class: "hint" }, "Press a word to see the likeliest others in its place, and to go on from one of them:"));
  tokens.replaceChildren(...labels.map((label, at) => {
    const made = element("button", { type: "button", "aria-expanded": "false", title: "other words in this place" }, label);
    made.addEventListener("click", () => {
      const open = made.getAttribute("aria-expanded") === "true";
      for (const one of tokens.querySelectorAll(".alternative")) one.remove();
      for (const one of tokens.children) one.setAttribute("aria-expanded", "false");
      if (open) return;
      made.setAttribute("aria-expanded", "true");
      const before = plain(done.labels.slice(0, at).join(""));
      made.after(...others[at].map(([text, share]) => element("button", { type: "button", class: "alternative", "aria-expanded": "false",
        onclick: () => force(`${before}${plain(text)}`) }, `→ ${text} ${(100 * share).toPrecision(2)} %`)));
    });
    return made;
  }));
}

/** The text of labels: spaces are printed as signs. */
const plain = (label) => label.replace(/[␣▁]/gu, " ").replace(/<[^>]*>/g, "");

function force(text) {
  part("prefix").value = text.trim();
  part("options").open = true;
  answer();
}

/** Show the attention of subjects, the second beside the first. */
async function look(subjects, signal) {
  const data = await (await server.ask("/regard/v1/view", { subjects }, signal)).json();
  questions?.stop();
  view?.remove();
  questions = asker(server.kernel(subjects));
  root.hidden = false;
  given = data;
  const reader = (known, read) => kernelReader(known, read, questions.ask, (what) => view?.renew(what));
  const before = Object.fromEntries(new URLSearchParams(link));
  for (const name of ["example", "query", "key", "with", "zoom"]) delete before[name];
  const start = { ...before, view: subjects.length > 1 ? "compare" : before.view === "compare" ? "matrix" : before.view };
  view = render(root, data, { start, reader, onLink: (changed) => { link = changed; } });
  await view.ready;
  signal.throwIfAborted();
  part("heads").hidden = false;
}

function shownHead() {
  const { example, map, heads } = view.state(), { name } = given.examples[example].maps[map];
  return heads[0] === "mean" ? null : { map: name, head: heads[0] };
}

const nameOf = ({ map, head, factor }) => (factor === 0 ? `${map} head ${head} cut` : `${map} head ${head} × ${factor}`);

function change() {
  const head = shownHead();
  if (!head) {
    say("Choose a head, not the mean.");
    return;
  }
  const edit = { ...head, factor: Number(part("factor").value) || 0 };
  edits = [...edits.filter((one) => one.map !== edit.map || one.head !== edit.head), edit];
  drawEdits();
  answer();
}

function drawEdits() {
  part("edits").replaceChildren(...edits.map((edit) => element("button", { type: "button", class: "edit", title: "undo",
    onclick: () => {
      edits = edits.filter((one) => one !== edit);
      drawEdits();
      answer();
    } }, `${nameOf(edit)} ✕`)));
}

part("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (part("key").hidden) answer();
  else begin();
});
part("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  answer();
});
part("text").addEventListener("focus", ({ target }) => {
  if (isExample(target.value)) target.select();
});
part("stop").addEventListener("click", () => running?.abort());
part("cut").addEventListener("click", change);
part("model").addEventListener("change", choose);
const started = begin();
// For tests and for debugging, as on the page.
globalThis.regard = () => view;
globalThis.regardStarted = started;

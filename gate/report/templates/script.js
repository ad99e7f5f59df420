"use strict";
// Works in a frame that allows scripts and nothing else: no storage, no network, no clipboard.
const say = (text) => { document.getElementById("copied").textContent = text; };

function select(element) {
  const range = document.createRange();
  range.selectNodeContents(element);
  const selection = window.getSelection();
  selection.removeAllRanges();
  selection.addRange(range);
}

async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    say("Copied");
    return;
  } catch { /* a sandboxed frame has no clipboard */ }
  select(element);
  let done = false;
  try { done = document.execCommand("copy"); } catch { /* neither this one */ }
  say(done ? "Copied" : "Selected: copy it with Ctrl+C");
}

function sort(button) {
  const head = button.closest("th");
  const body = button.closest("table").tBodies[0];
  const column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.cells[column].dataset.value;
  const size = (text) => {
    if (text === "inf" || text === "nan") return Infinity;
    return text === "" ? -Infinity : Number(text);
  };
  const compare = button.dataset.kind === "number"
    ? (a, b) => { const x = size(value(a)), y = size(value(b)); return x < y ? -1 : x > y ? 1 : 0; }
    : (a, b) => value(a).localeCompare(value(b));
  const rows = Array.from(body.rows).sort((a, b) => (down ? -1 : 1) * compare(a, b));
  body.append(...rows);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button === null) return;
  if (button.dataset.copy) copy(document.getElementById(button.dataset.copy));
  else if (button.dataset.kind) sort(button);
});
// Paper has no folds; those of single checks stay, or it would be a book.
window.addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details:not(details details)")) fold.open = true;
});

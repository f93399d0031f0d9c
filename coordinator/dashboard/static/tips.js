// Explanations of words, from the list at the foot of the page: beside a word that the pointer or the focus is on.

const tip = document.createElement("p");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

// `word` names the list's entry, "word-" before its id.
export function explain(element, word, isFocusable = true) {
  element.dataset.word = word;
  if (isFocusable) element.tabIndex = 0;
}

let explained = null;

function show(element) {
  hide();
  explained = element;
  tip.textContent = document.getElementById(`word-${element.dataset.word}`).textContent;
  tip.hidden = false;
  element.setAttribute("aria-describedby", "tip");
  put();
}

function put() {
  if (!explained) return;
  const place = explained.getBoundingClientRect();
  const left = Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const fits = place.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${fits ? place.bottom + 6 : Math.max(8, place.top - 6 - tip.offsetHeight)}px`;
}

function hide() {
  tip.hidden = true;
  explained?.removeAttribute("aria-describedby");
  explained = null;
}

for (const [begin, end] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  document.addEventListener(begin, (event) => {
    const element = event.target.closest?.("[data-word]");
    if (element) show(element);
  });
  document.addEventListener(end, (event) => { if (explained && event.target.closest?.("[data-word]") === explained) hide(); });
}
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
document.addEventListener("scroll", put, { capture: true, passive: true });

// Keeps a page up to date without a reload. What comes is HTML from Virgate, which has escaped
// everything; the page's policy lets no other script run.
"use strict";
const lost = document.getElementById("lost"), told = document.getElementById("told");

// ask fetches an address.
async function ask(address) {
  const answer = await fetch(address, { signal: AbortSignal.timeout(30000) });
  if (!answer.ok) throw new Error(answer.status + " " + answer.statusText);
  return answer;
}

// keep calls renew so many milliseconds after it has ended, but not while nobody looks.
function keep(every, renew) {
  let heard = Date.now(), asking = null, timer = 0;
  function next() {
    clearTimeout(timer);
    if (document.hidden || asking) return;
    asking = renew().then(() => {
      heard = Date.now();
      lost.hidden = true;
    }, error => {
      lost.textContent = `No answer since ${new Date(heard).toLocaleTimeString()}; what is shown is from before. ${error.message}`;
      lost.hidden = false;
    }).finally(() => { asking = null; timer = setTimeout(next, every); });
  }
  document.addEventListener("visibilitychange", next);
  timer = setTimeout(next, every);
}

// become changes what differs in a node of the document, so that the rest stays selected and focused.
function become(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  const inside = [...old.childNodes], next = [...fresh.childNodes];
  if (inside.length && inside.length === next.length && old.cloneNode(false).isEqualNode(fresh.cloneNode(false)))
    inside.forEach((node, i) => become(node, next[i]));
  else
    old.replaceWith(fresh);
}

if (document.body.dataset.every) keep(Number(document.body.dataset.every), async () => {
  const page = new DOMParser().parseFromString(await (await ask(location.href)).text(), "text/html");
  become(document.querySelector("main"), page.querySelector("main"));
});
// A touch has no tooltip.
document.addEventListener("click", event => {
  const title = event.target.closest?.("svg rect")?.querySelector("title");
  told.textContent = title ? title.textContent : "";
  told.hidden = !title;
});
document.addEventListener("keydown", event => { if (event.key === "Escape") told.hidden = true; });

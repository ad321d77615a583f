// Keep the page at the state of the run: ask for it again and again, and change only what differs, so that what the
// reader has opened and scrolled to stays.
"use strict";
(() => {
  const every = 3000; // milliseconds between two requests
  const status = document.getElementById("live");
  const address = window.location.href.replace(/#.*/, "");
  let tag = "";

  function morph(shown, fresh) {
    if (shown.isEqualNode(fresh)) return;
    if (shown.nodeType !== Node.ELEMENT_NODE || shown.nodeName !== fresh.nodeName) {
      shown.replaceWith(fresh.cloneNode(true));
      return;
    }
    for (const { name, value } of fresh.attributes) {
      if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
    }
    for (const { name } of [...shown.attributes]) {
      if (name !== "open" && !fresh.hasAttribute(name)) shown.removeAttribute(name); // `open`: the reader's own
    }
    const before = [...shown.childNodes];
    [...fresh.childNodes].forEach((child, index) => {
      if (index < before.length) morph(before[index], child);
      else shown.append(child.cloneNode(true));
    });
    before.slice(fresh.childNodes.length).forEach((child) => child.remove());
  }

  function say(text, lost) {
    status.textContent = text;
    status.classList.toggle("lost", lost);
  }

  const clock = () => new Date().toLocaleTimeString();
  let last = clock();

  async function update() {
    try {
      const answer = await fetch(address, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of ["main", "footer"]) morph(document.querySelector(part), fresh.querySelector(part));
        tag = answer.headers.get("ETag") || "";
      } else if (answer.status !== 304) {
        throw new Error((await answer.text()).trim());
      }
      last = clock();
      say(`live, as of ${last}`, false);
    } catch (error) {
      const reason = error instanceof TypeError ? "megalaunch watch does not answer" : error.message;
      say(`${reason}; the page is of ${last}`, true);
    }
    setTimeout(update, every);
  }
  update();
})();

// The form says what is wrong while it is filled, and a preview's page follows its progress. Everything works without it.
"use strict";

const form = document.getElementById("policy");
if (form) {
  let timer = 0;
  let asked = 0;

  const told = (kind, text) => {
    const line = document.createElement("span");
    line.className = kind;
    line.textContent = text;
    return line;
  };

  const listed = (kind, finding) => {
    const line = document.createElement("li");
    const place = document.createElement("code");
    line.className = kind;
    place.textContent = finding.place;
    line.append(place, ` ${kind === "advice" ? "warning: " : ""}${finding.sentence}`);
    return line;
  };

  const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  const show = (answer) => {
    for (const place of form.querySelectorAll("[data-beside]")) place.replaceChildren();
    for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
    for (const [kind, findings] of [["fault", answer.faults], ["advice", answer.advice]]) {
      for (const finding of findings) {
        const place = document.getElementById(`b-${finding.field}`);
        if (place) place.append(told(kind, finding.text));
        const input = kind === "fault" && form.elements.namedItem(finding.field);
        if (input) input.setAttribute("aria-invalid", "true");
      }
    }
    const warned = answer.advice.length ? `, with ${many(answer.advice.length, "warning")}` : "";
    document.getElementById("verdict-head").textContent = answer.sound ? `This policy can be used${warned}` : many(answer.faults.length, "fault");
    document.getElementById("findings").replaceChildren(
      ...answer.faults.map((each) => listed("fault", each)), ...answer.advice.map((each) => listed("advice", each)));
    document.getElementById("kept").hidden = !answer.edited;
    document.getElementById("lost").hidden = answer.edited;
    if (answer.sound) document.getElementById("parts").innerHTML = answer.parts;
  };

  const check = async () => {
    const number = ++asked;
    try {
      const answer = await fetch(form.dataset.check, { method: "POST", body: new URLSearchParams(new FormData(form)) });
      if (answer.ok && number === asked) show(await answer.json());
    } catch {
      // Submitting checks as well.
    }
  };

  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(check, 300);
  });
}

const preview = document.getElementById("preview");
if (preview) {
  const look = async () => {
    try {
      const answer = await fetch(preview.dataset.state);
      const found = await answer.json();
      if (found.state !== "running") {
        location.reload();
        return;
      }
      document.getElementById("part").value = found.part;
      document.getElementById("doing").textContent = found.doing;
    } catch {
      // The next look may find it.
    }
    setTimeout(look, 700);
  };
  setTimeout(look, 700);
}

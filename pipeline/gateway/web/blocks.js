// An answer's Markdown as elements, as far as it helps reading: code, paragraphs, headings, bold. All texts are put in as
// texts, so nothing in an answer is ever read as HTML.

const FENCE = /^( *)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/; // at any depth: code stands in items of lists, too
const HEADING = /^#{1,6} /;

// The blocks of a text, each { kind: "code" or "text", text, language }. The last one may be unfinished.
export function blocksOf(text) {
  const blocks = [];
  let block = null;
  let fence = "";
  let depth = 0; // the fence's, which its lines have, too
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      if (mark && mark[2].startsWith(fence) && !mark[3]) [block, fence] = [null, ""];
      else block.lines.push(line.slice(Math.min(depth, line.search(/[^ ]|$/))));
    } else if (mark) {
      [depth, fence] = [mark[1].length, mark[2]];
      blocks.push((block = { kind: "code", lines: [], language: mark[3] }));
    } else if (!line.trim()) {
      block = null;
    } else {
      const heading = HEADING.test(line);
      if (!block || heading) blocks.push((block = { kind: "text", lines: [], language: "" }));
      block.lines.push(line);
      if (heading) block = null;
    }
  }
  return blocks.map(({ kind, lines, language }) => ({ kind, language, text: lines.join("\n") }));
}

const INLINE = /(`+)(.+?)\1(?!`)|\*\*(.+?)\*\*/gs;

function fillText(paragraph, text) {
  const heading = /^#{1,6} +/.exec(text);
  paragraph.className = heading ? "heading" : "";
  const shown = heading ? text.slice(heading[0].length) : text;
  paragraph.replaceChildren();
  let at = 0;
  for (const match of shown.matchAll(INLINE)) {
    const element = document.createElement(match[1] ? "code" : "strong");
    element.textContent = match[2] ?? match[3];
    paragraph.append(shown.slice(at, match.index), element);
    at = match.index + match[0].length;
  }
  paragraph.append(shown.slice(at));
}

function codeElement(language) {
  const [figure, caption, pre, code] = ["figure", "figcaption", "pre", "code"].map((n) => document.createElement(n));
  caption.append(Object.assign(document.createElement("span"), { textContent: language || "code" }));
  if (navigator.clipboard) {
    const copy = Object.assign(document.createElement("button"), { type: "button", textContent: "Copy" });
    copy.onclick = async () => {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    };
    caption.append(copy);
  }
  pre.tabIndex = 0; // so that the keyboard can scroll it
  pre.append(code);
  figure.append(caption, pre);
  return figure;
}

// Shows a text in an element. Of a text that grows, only the blocks that have changed are made again.
export function show(element, text) {
  const shown = (element.blocks ??= []);
  const blocks = blocksOf(text);
  // Less than before where a line turns out to be no fence: "```" has become "```x```".
  for (; shown.length > blocks.length; shown.pop()) element.lastElementChild.remove();
  blocks.forEach((block, at) => {
    const before = shown[at];
    if (before && before.text === block.text && before.kind === block.kind && before.language === block.language) return;
    let child = element.children[at];
    if (!before || before.kind !== block.kind || before.language !== block.language) {
      const made = block.kind === "code" ? codeElement(block.language) : document.createElement("p");
      if (child) child.replaceWith(made);
      else element.append(made);
      child = made;
    }
    if (block.kind === "code") child.querySelector("code").textContent = block.text;
    else fillText(child, block.text);
    shown[at] = block;
  });
}

// Markdown as DOM nodes. What a model writes is never parsed as HTML: every text becomes a text node, and a link keeps
// only an http or https address. The subset that chat models write: headings, lists, quotes, fences, bold, italic, code,
// links. Tables stay text.
"use strict";

const DEEPEST = 6; // quotes and lists inside each other; what is deeper stays text

function markdown(text, depth = 0) {
  const root = document.createDocumentFragment();
  if (depth > DEEPEST) {
    root.append(text);
    return root;
  }
  const lines = text.split("\n");
  let at = 0;
  const add = (name, parent = root) => parent.appendChild(document.createElement(name));
  while (at < lines.length) {
    const line = lines[at];
    const fence = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/);
    if (fence) {
      const code = [];
      for (at++; at < lines.length && !lines[at].trimStart().startsWith(fence[1]); at++) code.push(lines[at]);
      at++; // a fence that is still open ends with the text
      root.append(codeBlock(code.join("\n"), fence[2]));
      continue;
    }
    const heading = line.match(/^(#{1,6})\s+(.*)/);
    if (heading) {
      inline(heading[2], add(`h${Math.min(6, heading[1].length + 2)}`));
      at++;
      continue;
    }
    if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      add("hr");
      at++;
      continue;
    }
    if (/^\s*>/.test(line)) {
      const quoted = [];
      for (; at < lines.length && /^\s*>/.test(lines[at]); at++) quoted.push(lines[at].replace(/^\s*>\s?/, ""));
      add("blockquote").append(markdown(quoted.join("\n"), depth + 1));
      continue;
    }
    const item = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)/;
    if (item.test(line)) {
      const list = add(/\d/.test(line.match(item)[2]) ? "ol" : "ul");
      if (list.tagName === "OL") list.start = parseInt(line.match(item)[2]);
      while (at < lines.length && item.test(lines[at])) {
        const [, indent, , first] = lines[at].match(item);
        const inner = [first];
        const deeper = new RegExp(`^\\s{${indent.length + 2},}\\S`);
        for (at++; at < lines.length && (deeper.test(lines[at]) || (lines[at] === "" && deeper.test(lines[at + 1] || ""))); at++) {
          inner.push(lines[at].slice(indent.length + 2));
        }
        const place = add("li", list);
        if (inner.length === 1) inline(first, place);
        else place.append(markdown(inner.join("\n"), depth + 1));
        while (lines[at] === "" && item.test(lines[at + 1] || "")) at++;
      }
      continue;
    }
    if (line.trim() === "") {
      at++;
      continue;
    }
    const words = [];
    for (; at < lines.length && lines[at].trim() !== "" && !/^\s*(```|~~~|>|#{1,6}\s|[-*+]\s|\d{1,9}[.)]\s)/.test(lines[at]); at++) {
      words.push(lines[at]);
    }
    if (!words.length) words.push(lines[at++]);
    inline(words.join("\n"), add("p"));
  }
  return root;
}

function codeBlock(code, language) {
  const pre = document.createElement("pre");
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy";
  copy.textContent = language ? `${language} · copy` : "copy";
  copy.addEventListener("click", () => {
    navigator.clipboard?.writeText(code);
    copy.textContent = "copied";
  });
  const element = document.createElement("code");
  element.textContent = code;
  pre.append(copy, element);
  return pre;
}

// `code`, **bold**, *italic*, [text](address) of one paragraph, as nodes of `parent`. Nothing is nested deeper than it
// is written, and every step consumes text, so that no input takes long.
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*([^*\n][^\n]*?)\*\*|(?<![\w*])\*([^*\s][^*\n]*?)\*(?![\w*])|\[([^\]\n]{1,500})\]\((https?:\/\/[^\s()<>]{1,2000})\)/;

function inline(text, parent, depth = 0) {
  for (let rounds = 0; text && rounds < 2000; rounds++) {
    const found = depth < 4 ? text.match(INLINE) : null;
    if (!found) break;
    parent.append(text.slice(0, found.index));
    const [whole, , code, bold, italic, label, address] = found;
    if (code !== undefined) parent.appendChild(document.createElement("code")).textContent = code.trim();
    else if (bold !== undefined) inline(bold, parent.appendChild(document.createElement("strong")), depth + 1);
    else if (italic !== undefined) inline(italic, parent.appendChild(document.createElement("em")), depth + 1);
    else {
      const link = parent.appendChild(document.createElement("a"));
      link.href = address;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      link.textContent = label;
    }
    text = text.slice(found.index + whole.length);
  }
  parent.append(text);
}

// A byte as something to look at: a letter as itself, what cannot be seen as a placeholder.

const NAMES = new Map([
  [9, "tab"],
  [10, "newline"],
  [13, "carriage return"],
  [32, "space"],
  [0, "zero byte"],
  [127, "delete"],
]);
const SIGNS = new Map([
  [9, "⇥"],
  [10, "↵"],
  [32, "·"],
]);

const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");

/** What stands for the byte in running text, and of which kind it is: letter, space, newline, tab or byte. */
export function glyph(byte) {
  if (SIGNS.has(byte)) return { text: SIGNS.get(byte), kind: NAMES.get(byte) };
  if (byte > 32 && byte < 127) return { text: String.fromCharCode(byte), kind: "letter" };
  return { text: hex(byte), kind: "byte" };
}

/** The byte in words: “e”, space, byte C3. */
export function nameOf(byte) {
  if (NAMES.has(byte)) return NAMES.get(byte);
  return byte > 32 && byte < 127 ? `“${String.fromCharCode(byte)}”` : `byte ${hex(byte)}`;
}

/** Split text into runs that show as they are and characters that need a placeholder: [text, kind or null] pairs. */
export function pieces(text) {
  const found = [];
  let plain = "";
  const flush = () => {
    if (plain) found.push([plain, null]);
    plain = "";
  };
  for (const character of text) {
    const code = character.codePointAt(0);
    if (code === 10) {
      flush();
      found.push(["↵\n", "newline"]);
    } else if (code < 32 || (code >= 127 && code < 160)) {
      flush();
      found.push([code === 9 ? "⇥\t" : hex(code), code === 9 ? "tab" : "byte"]);
    } else if (code >= 0xd800 && code <= 0xdfff) {
      // Half of a pair: a byte that was no UTF-8, kept as Python's surrogateescape keeps it.
      flush();
      found.push([hex(code & 0xff), "byte"]);
    } else {
      plain += character;
    }
  }
  flush();
  return found;
}

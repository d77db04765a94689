// Which parts of a passage an answer uses: what it quotes, and the sentence that says what a cited sentence says.

const WORD = /[\p{L}\p{N}]+(?:['’][\p{L}\p{N}]+)?/gu;
const SENTENCE = /[^.!?\n]+(?:[.!?]+(?!\s|$)[^.!?\n]*)*[.!?]*/g;
const CITATION = /[[\u3010]\s*(\d{1,3}(?:\s*[-\u2013,;]\s*\d{1,3})*)\s*[\]\u3011]/g;
// As in specrag/methods/citations.py: half of a sentence's content words support it.
const SUPPORTED = 0.5;
const SMALL = new Set(`a about after all also although an and any are as at according be because been before being
  between both but by can could did do does during each either for from had has have he her him his how however i if in
  into is it its itself just may me might more most must my no nor not of off on once one only or other our out over own
  passage passages question said same she should since so some source sources such than that the their them then there
  these they this those through thus to too under until up upon us very was we were what when where which while who whom
  whose why will with within without would yes you your`.split(/\s+/));

/** The words of a text, in lower case, with their places: {word, start, end}. */
function words(text) {
  return Array.from(text.matchAll(WORD), (match) => ({
    word: match[0].normalize("NFKC").toLowerCase().replace(/['’]s$/, ""),
    start: match.index,
    end: match.index + match[0].length,
  }));
}

const weighs = ({ word }) => !SMALL.has(word);

/** The citations of an answer: {start, end, numbers, sentence}. */
export function citations(answer) {
  const sentences = [...answer.matchAll(SENTENCE)];
  return Array.from(answer.matchAll(CITATION), (match) => {
    // The last sentence with words in front of the mark: marks stand behind full stops.
    const around = sentences.findLast((each) => each.index <= match.index && hasWords(answer.slice(each.index, match.index)));
    return {
      start: match.index,
      end: match.index + match[0].length,
      numbers: numbersOf(match[1]),
      sentence: (around?.[0] ?? "").replace(CITATION, ""),
    };
  });
}

const hasWords = (text) => words(text.replace(CITATION, " ")).length > 0;

function numbersOf(listed) {
  return listed.split(/[,;]/).flatMap((part) => {
    const [first, last = first] = part.split(/[-\u2013]/).map(Number);
    return last > first && last - first < 100
      ? Array.from({ length: last - first + 1 }, (_, index) => first + index) : [first];
  });
}

/**
 * The runs of words that a passage and an answer share, as [start, end] in the passage: three words in a row of which
 * two say something, or two that both do.
 */
export function quoted(passage, answer) {
  const read = words(passage);
  const shared = new Set();
  const said = words(answer.replace(CITATION, " "));
  for (const size of [2, 3]) {
    for (let at = 0; at + size <= said.length; at += 1) shared.add(key(said, at, size));
  }
  const used = new Array(read.length).fill(false);
  for (const size of [2, 3]) {
    for (let at = 0; at + size <= read.length; at += 1) {
      const run = read.slice(at, at + size);
      if (run.filter(weighs).length >= 2 && shared.has(key(read, at, size))) used.fill(true, at, at + size);
    }
  }
  const spans = [];
  read.forEach(({ start, end }, index) => {
    if (!used[index]) return;
    if (index && used[index - 1]) spans.at(-1)[1] = end;
    else spans.push([start, end]);
  });
  return spans;
}

const key = (list, at, size) => list.slice(at, at + size).map(({ word }) => word).join(" ");

/** The sentence of a passage that holds most of what is said, as [start, end]; null where none holds half of it. */
export function supporting(passage, said) {
  const wanted = new Set(words(said).filter(weighs).map(({ word }) => word));
  let best = null;
  let most = SUPPORTED;
  for (const match of passage.matchAll(SENTENCE)) {
    const held = new Set(words(match[0]).map(({ word }) => word));
    const share = [...wanted].filter((word) => held.has(word)).length / wanted.size;
    if (share >= most && (best === null || share > most)) {
      const blank = match[0].length - match[0].trimStart().length;
      best = [match.index + blank, match.index + match[0].trimEnd().length];
      most = share;
    }
  }
  return best;
}

/** Where a passage says what a sentence says, as [start, end]: shared runs of words, else a sentence, else single words. */
export function matching(passage, sentence) {
  const runs = quoted(passage, sentence);
  if (runs.length) return runs;
  const whole = supporting(passage, sentence);
  if (whole) return [whole];
  const wanted = new Set(words(sentence).filter(weighs).map(({ word }) => word));
  return words(passage).filter(({ word }) => wanted.has(word)).map(({ start, end }) => [start, end]);
}

/** Cut a text of `length` characters where any span begins or ends: {start, end, kinds: names of spans around it}. */
export function segments(length, spansByKind) {
  const spans = Object.entries(spansByKind).flatMap(([kind, list]) => list.map(([start, end]) => ({ kind, start, end })));
  const cuts = [...new Set([0, length, ...spans.flatMap(({ start, end }) => [start, end])])].sort((a, b) => a - b);
  return cuts.slice(0, -1).map((start, index) => ({
    start,
    end: cuts[index + 1],
    kinds: [...new Set(spans.filter((span) => span.start <= start && start < span.end).map(({ kind }) => kind))],
  }));
}

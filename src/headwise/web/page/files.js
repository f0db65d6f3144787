// The files of the site, each fetched once.

const fetched = new Map();

async function load(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${path} could not be loaded: ${response.status} ${response.statusText}`);
  return response;
}

function once(path, read) {
  if (!fetched.has(path)) fetched.set(path, load(path).then(read));
  return fetched.get(path);
}

export const json = (path) => once(path, (response) => response.json());

/** The bytes that an op's programs refer to. */
export const data = (name) => once(`data/${name}.bin`, (response) => response.arrayBuffer());

/** Every WGSL text. Some servers unpack what is called .gz on the way: then it is JSON already. */
export const shaders = () =>
  once("shaders.json.gz", async (response) => {
    const bytes = await response.arrayBuffer();
    const [first, second] = new Uint8Array(bytes, 0, 2);
    if (first !== 0x1f || second !== 0x8b) return JSON.parse(new TextDecoder().decode(bytes));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(unpacked).text());
  });

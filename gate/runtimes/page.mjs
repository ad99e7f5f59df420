// The page in which onnxruntime-web runs: it fetches the file, computes its digest, and answers
// batches. Numbers come and go as gate/runtimes/browser/frame.py describes.

const ARRAYS = {
  float16: Uint16Array, float32: Float32Array, float64: Float64Array, bool: Uint8Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array,
  int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
};
const padded = (length) => length + ((8 - (length % 8)) % 8);

// Where ONNX Runtime put the nodes it says in its log only, which WebAssembly sends to the console.
let placements = [];
console.error = (...words) => {
  const [, line] = words.join(" ").match(/ VerifyEachNodeIsAssignedToAnEp\] (.*)/) ?? [];
  if (line) placements.push(line.trim());
};

let ort, session;

async function fetched(place) {
  const answer = await fetch(place);
  if (!answer.ok) throw new Error(`${place}: ${answer.status}`);
  const bytes = await answer.arrayBuffer();
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [bytes, Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("")];
}

async function adapter() {
  const found = navigator.gpu ? await navigator.gpu.requestAdapter() : null;
  if (!found) return null;
  const { vendor, architecture, device, description, isFallbackAdapter } = found.info;
  return { vendor, architecture, device, description, software: isFallbackAdapter ?? false };
}

async function open({ provider, engine, glue, wasm, threads, level, files }) {
  ort = await import(engine);
  const digests = {};
  const read = async (name, place) => {
    const [bytes, digest] = await fetched(place);
    digests[name] = digest;
    return new Uint8Array(bytes);
  };
  ort.env.wasm.numThreads = threads;
  ort.env.wasm.wasmPaths = { mjs: glue };
  ort.env.wasm.wasmBinary = await read("", wasm);
  const [model, ...data] = files;
  const bytes = await read(...model);
  const externalData = [];
  for (const [name, place] of data) externalData.push({ path: name, data: await read(name, place) });
  placements = [];
  session = await ort.InferenceSession.create(bytes, {
    executionProviders: [provider],
    graphOptimizationLevel: level,
    externalData,
    logSeverityLevel: 0,
    logVerbosityLevel: 0,
  });
  return {
    version: ort.env.versions.web,
    threads: ort.env.wasm.numThreads,
    isolated: crossOriginIsolated,
    inputs: session.inputNames,
    outputs: session.outputNames,
    digests,
    placements,
  };
}

async function run() {
  const answer = await fetch("batch");
  if (!answer.ok) throw new Error(`batch: ${answer.status}`);
  const feeds = unpack(await answer.arrayBuffer());
  const start = performance.now();
  const outputs = await session.run(feeds);
  const seconds = (performance.now() - start) / 1000;
  const named = session.outputNames.map((name) => [name, outputs[name]]);
  const sent = await fetch("outputs", { method: "POST", body: pack(named) });
  if (!sent.ok) throw new Error(`outputs: ${sent.status}`);
  return seconds;
}

function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const feeds = {};
  let start = 4 + length;
  for (const [name, type, shape, size] of header) {
    const view = ARRAYS[type];
    const numbers = new view(buffer, start, size / view.BYTES_PER_ELEMENT);
    feeds[name] = new ort.Tensor(type, numbers, shape);
    start += padded(size);
  }
  return feeds;
}

function pack(named) {
  const header = [], bodies = [];
  for (const [name, { type, dims, data }] of named) {
    if (!ARRAYS[type]) throw new Error(`output ${name} is ${type}, expected a tensor of numbers`);
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    header.push([name, type, dims, bytes.length]);
    bodies.push(bytes, new Uint8Array(padded(bytes.length) - bytes.length));
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const filled = new Uint8Array(padded(4 + text.length)).fill(32);
  new DataView(filled.buffer).setUint32(0, filled.length - 4, true);
  filled.set(text, 4);
  return new Blob([filled, ...bodies]);
}

globalThis.gate = { open, run, adapter };

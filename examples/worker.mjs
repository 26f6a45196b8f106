// A Towpath worker in Node, without packages: node worker.mjs URL QUEUE NAME ANSWERER_URL
import { createHash, randomUUID } from "node:crypto";
import { readFile } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";

const [URL, QUEUE, NAME, ANSWERER_URL] = process.argv.slice(2);
const LEASE_SECONDS = 15;
let stopping = false;
let jobs = [];

// Every call is safe to repeat, so a failure that may pass is tried again.
async function post(url, body) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  for (;;) {
    const signal = AbortSignal.timeout(30_000);
    const answer = await fetch(url, { ...request, signal }).catch(() => ({ status: 503 }));
    if (answer.ok) return answer.json();
    if (![429, 503].includes(answer.status)) throw new Error(`${url}: ${await answer.text()}`);
    await sleep(1000);
  }
}

async function measure_file({ args }) {
  const content = await readFile(args.path);
  const words = content.toString("latin1").match(/[^ \t\n\v\f\r]+/g) ?? []; // \s has more than ASCII has
  return { sha256: createHash("sha256").update(content).digest("hex"), words: words.length };
}

async function review_file(job) {
  let answer = job.callback_results.review;
  if (!answer) {
    const { id, lease, args } = job;
    const wait = await post(`${URL}/v1/jobs/${id}/callbacks`, { lease, name: "review", timeout_seconds: 60 });
    await post(ANSWERER_URL, { callback_url: wait.urls.resume, ...args });
    [answer] = (await post(`${URL}/v1/jobs/${id}/park`, { lease, wait_id: wait.wait_id })).callbacks;
  }
  // Still no answer: it is parked, and whoever claims it after the callback finishes it.
  return answer && { ...(await measure_file(job)), review: answer.payload };
}

const handlers = { measure_file, review_file };

// What became of the job; nothing when it is parked.
async function report(job) {
  const { id, lease } = job;
  if (stopping) return { id, lease, outcome: "release" };
  try {
    const result = await handlers[job.kind](job);
    return result && { id, lease, outcome: "complete", result };
  } catch (error) {
    return { id, lease, outcome: "retry", error: { message: String(error) } };
  }
}

async function keepLeases() {
  const held = jobs;
  if (!held.length) return;
  const answer = await post(`${URL}/v1/heartbeats`, { heartbeats: held.map(({ id, lease }) => ({ id, lease })) });
  answer.heartbeats.forEach((beat, n) => (held[n].lost = beat.status !== "ok"));
}

process.on("SIGTERM", () => (stopping = true));
setInterval(keepLeases, (LEASE_SECONDS * 1000) / 3).unref();
const claim = { queues: [QUEUE], kinds: Object.keys(handlers), worker: NAME, limit: 5, lease_seconds: LEASE_SECONDS };
let settlements = [];
while (settlements.length || !stopping) {
  // With a claim_id, a repeated claim gets the jobs that it got before.
  const wanted = stopping ? null : { ...claim, wait_seconds: 3, claim_id: randomUUID() };
  const answer = await post(`${URL}/v1/settlements`, { settlements, claim: wanted });
  const claimed = answer.claim ?? answer.claim_problem ?? {};
  jobs = claimed.jobs ?? [];
  settlements = [];
  for (const job of jobs) {
    const done = !job.lost && (await report(job));
    if (done) settlements.push(done);
  }
  await sleep(1000 * (claimed.retry_after_seconds ?? 0));
}

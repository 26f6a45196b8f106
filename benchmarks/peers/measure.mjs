// What the Node peers' runs share; the same as measure.py.
export const URL = process.env.BENCH_URL
export const QUEUE = 'bench'
export const now = () => (performance.timeOrigin + performance.now()) / 1000
const padded = Number(process.env.BENCH_PADDING) ? { padding: 'x'.repeat(Number(process.env.BENCH_PADDING)) } : {}
export const payload = (n) => ({ user_id: n, email: 'someone@example.com', template: 'welcome', t: now(), ...padded })
export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
export const tell = (figures) => console.log('@@' + JSON.stringify(figures))

const percentile = (values, share) => {
  const sorted = [...values].sort((a, b) => a - b)
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0
}

export class Meter {
  constructor (jobs) {
    this.jobs = jobs
    this.seconds = []
    this.done = new Promise((resolve) => { this.finish = resolve })
  }

  hit (began) {
    this.last = now()
    this.first ??= this.last
    this.seconds.push(this.last - began)
    if (this.seconds.length >= this.jobs) this.finish()
  }

  report () {
    const late = this.seconds.slice(Math.floor(this.seconds.length / 10))
    tell({
      jobs: this.seconds.length,
      per_second: this.seconds.length / Math.max(1e-9, this.last - this.first),
      p50_ms: 1000 * percentile(late, 0.5),
      p99_ms: 1000 * percentile(late, 0.99)
    })
  }
}

export async function closed (call, calls, callers) {
  let next = 0
  const seconds = []
  const began = now()
  await Promise.all(Array.from({ length: callers }, async () => {
    while (next < calls) {
      const at = now()
      await call(next++)
      seconds.push(now() - at)
    }
  }))
  tell({ per_second: calls / (now() - began), p50_ms: 1000 * percentile(seconds, 0.5), p99_ms: 1000 * percentile(seconds, 0.99) })
}

export async function paced (call, rate, seconds) {
  const began = now()
  const calls = []
  for (let n = 0; n < rate * seconds; n++) {
    const pause = began + n / rate - now()
    if (pause > 0) await sleep(pause * 1000)
    calls.push(call(n))
  }
  await Promise.all(calls)
}

export async function bulk (call, jobs, size) {
  const began = now()
  for (let start = 0; start < jobs; start += size) await call(Array.from({ length: size }, (_, k) => start + k))
  tell({ per_second: jobs / (now() - began) })
}

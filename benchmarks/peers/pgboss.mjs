// pg-boss by its public paths: send, insert, and work loops that ask again at once after a full batch.
import PgBoss from 'pg-boss'
import { QUEUE, URL, Meter, bulk, closed, paced, payload, sleep } from './measure.mjs'

const [what, ...rest] = process.argv.slice(2)
const numbers = rest.map(Number)
const boss = new PgBoss({ connectionString: URL, max: what === 'single' ? Math.min(numbers[1], 60) : 20, supervise: what === 'work', schedule: false })
boss.on('error', (error) => console.error(String(error)))
await boss.start()

if (what === 'setup') await boss.createQueue(QUEUE)
if (what === 'single') await closed((n) => boss.send(QUEUE, payload(n)), ...numbers)
if (what === 'bulk') await bulk((ns) => boss.insert(ns.map((n) => ({ name: QUEUE, data: payload(n) }))), ...numbers)
if (what === 'produce') await paced((n) => boss.send(QUEUE, payload(n)), ...numbers)
if (what === 'work') {
  const [jobs, loops, limit, batch] = numbers
  const meter = new Meter(jobs)
  for (let n = 0; n < loops; n++) {
    const id = await boss.work(QUEUE, { batchSize: batch, pollingIntervalSeconds: 0.5 }, async (got) => {
      for (const job of got) meter.hit(job.data.t)
      if (got.length === batch) setImmediate(() => boss.notifyWorker(id))
    })
  }
  await Promise.race([meter.done, sleep(limit * 1000)])
  await sleep(500)
  meter.report()
}
await boss.stop({ graceful: true, wait: true, timeout: 3000 }).catch(() => {})
process.exit(0)

// graphile-worker by its public paths: addJob, addJobs, and its worker with a local queue and batched completion.
import graphile from 'graphile-worker'
import { URL, Meter, bulk, closed, paced, payload, sleep } from './measure.mjs'

const { run, makeWorkerUtils, Logger } = graphile
const [what, ...rest] = process.argv.slice(2)
const numbers = rest.map(Number)
const logger = new Logger(() => (level, message) => { if (level === 'error') console.error(message) })

if (what === 'work') {
  const [jobs, concurrency, limit, local] = numbers
  const meter = new Meter(jobs)
  const worker = { connectionString: URL, concurrentJobs: concurrency, maxPoolSize: Math.min(concurrency + 2, 60), pollInterval: 2000 }
  if (local) Object.assign(worker, { localQueue: { size: local }, completeJobBatchDelay: 0, failJobBatchDelay: 0 })
  const runner = await run({ logger, preset: { worker }, noHandleSignals: true, taskList: { bench: async (job) => meter.hit(job.t) } })
  await Promise.race([meter.done, sleep(limit * 1000)])
  await sleep(500)
  await runner.stop()
  meter.report()
  process.exit(0)
}

const utils = await makeWorkerUtils({ connectionString: URL, logger, maxPoolSize: what === 'single' ? Math.min(numbers[1], 60) : 20 })
if (what === 'setup') await utils.migrate()
if (what === 'single') await closed((n) => utils.addJob('bench', payload(n)), ...numbers)
if (what === 'bulk') await bulk((ns) => utils.addJobs(ns.map((n) => ({ identifier: 'bench', payload: payload(n) }))), ...numbers)
if (what === 'produce') await paced((n) => utils.addJob('bench', payload(n)), ...numbers)
await utils.release()
process.exit(0)

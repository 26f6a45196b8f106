-- One durable job a request, or BENCH_JOBS in a batch. The ids that were answered go to BENCH_LOG.
local each = tonumber(os.getenv("BENCH_JOBS") or "1")
local job = '{"queue": "bench", "kind": "send", "args": {"user_id": 17, "email": "someone@example.com", "template": "welcome"}}'

wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
if each == 1 then
  wrk.path = "/v1/jobs"
  wrk.body = job
else
  wrk.path = "/v1/jobs/batch"
  local jobs = {}
  for n = 1, each do jobs[n] = job end
  wrk.body = '{"jobs": [' .. table.concat(jobs, ",") .. ']}'
end

-- With BENCH_PAUSE_MS, each connection thinks between its requests, for any time up to twice as long.
local pause = tonumber(os.getenv("BENCH_PAUSE_MS") or "0")
if pause > 0 then
  function delay() return math.random(0, 2 * pause) end
end

local threads = {}
function setup(thread) table.insert(threads, thread) end

function init()
  wrong = 0
  log = io.open(os.getenv("BENCH_LOG"), "w")
end

function response(status, headers, body)
  if status ~= 200 and status ~= 201 then
    wrong = wrong + 1
  elseif each == 1 then
    log:write(body:match('"id": ?"([^"]+)"') or "", "\n")
  else
    for id in body:gmatch('"id": ?"([^"]+)"') do log:write(id, "\n") end
  end
end

function done(summary, latency)
  local wrong = 0
  for _, thread in ipairs(threads) do wrong = wrong + thread:get("wrong") end
  local errors = summary.errors
  wrong = wrong + errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format("@@ %d %d %d %d %d\n", summary.requests, wrong, summary.duration,
    latency:percentile(50), latency:percentile(99)))
end

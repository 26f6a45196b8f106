-- A thousand durable jobs a request.
wrk.method = "POST"
wrk.path = "/v1/jobs/batch"
wrk.headers["Content-Type"] = "application/json"
local job = '{"queue": "bench", "kind": "send", "args": {"user_id": 17, "email": "someone@example.com", "template": "welcome"}}'
local jobs = {}
for n = 1, 1000 do jobs[n] = job end
wrk.body = '{"jobs": [' .. table.concat(jobs, ",") .. ']}'

local threads = {}
function setup(thread) table.insert(threads, thread) end
function init() wrong = 0 end
function response(status) if status ~= 201 then wrong = wrong + 1 end end
function done(summary, latency)
  local wrong = 0
  for _, thread in ipairs(threads) do wrong = wrong + thread:get("wrong") end
  local errors = summary.errors
  wrong = wrong + errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format("@@ %d %d %d %d %d\n", summary.requests, wrong, summary.duration,
    latency:percentile(50), latency:percentile(99)))
end

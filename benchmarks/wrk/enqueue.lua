-- One durable job a request.
wrk.method = "POST"
wrk.path = os.getenv("BENCH_PATH") or "/v1/jobs"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"queue": "bench", "kind": "send", "args": {"user_id": 17, "email": "someone@example.com", "template": "welcome"}}'

local threads = {}
function setup(thread) table.insert(threads, thread) end
function init() wrong = 0 end
function response(status) if status ~= 201 and status ~= 200 then wrong = wrong + 1 end end
function done(summary, latency)
  local wrong = 0
  for _, thread in ipairs(threads) do wrong = wrong + thread:get("wrong") end
  local errors = summary.errors
  wrong = wrong + errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format("@@ %d %d %d %d %d\n", summary.requests, wrong, summary.duration,
    latency:percentile(50), latency:percentile(99)))
end

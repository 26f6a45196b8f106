from tests.build import Api, ok
def test_all(api: Api):
    for s in ["scheduled","available","running","waiting_external","retryable","completed","failed","cancelled"]:
        assert api.job(api.a_job_in(s))["state"] == s

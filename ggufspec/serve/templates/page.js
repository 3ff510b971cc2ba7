"use strict";
(() => {
  const POLL_MS = 2000, SLOW_MS = 10000;
  const $ = (id) => document.getElementById(id);
  const model = document.body.dataset.model, chat = document.body.dataset.chat === "yes";
  let key = "";  // in memory only
  let running = null;  // the AbortController of the answer in progress
  let timer = 0;

  // ---- requests ------------------------------------------------------------------------------------------------

  const headers = (more) => (key ? { ...more, Authorization: `Bearer ${key}` } : more);

  async function request(path, options) {
    try {
      return await fetch(path, options);
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error("the endpoint does not respond");
    }
  }

  async function refusal(response) {
    let said = "";
    try {
      const error = (await response.json()).error;
      said = [error.message, error.hint].filter(Boolean).join(": ");
    } catch {}
    return said || `the endpoint returned status ${response.status}`;
  }

  function askForKey() {
    const first = $("key-form").hidden;
    $("key-form").hidden = false;
    $("key-fault").textContent = key ? "The endpoint does not accept this key." : "";
    if (first || key) $("key").focus();
    key = "";
  }

  // ---- figures -------------------------------------------------------------------------------------------------

  const unknown = "–";
  const fixed = (digits, unit = "") => (value) => (value === null ? unknown : value.toFixed(digits) + unit);
  const whole = (value) => (value === null ? unknown : value.toLocaleString("en-US"));
  const speed = (value) => (value === null ? unknown : value.toPrecision(value < 1000 ? 3 : 4).replace(/e\+\d+$/, ""));
  const seconds = (value) => (value === null ? unknown : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);
  const percent = (value) => (value === null ? unknown : `${Math.round(value * 100)}%`);
  const gain = fixed(2, "×");
  const tiles = {
    tokens_per_s: speed, gain, acceptance_rate: percent, tokens_per_round: fixed(2), time_to_first_token_s: seconds,
    speculation: (on) => (on ? "on" : "off"),
  };
  const columns = [
    ["Answer", "number", (value) => `#${value}`], ["Tokens", "tokens", whole], ["Tokens/s", "tokens_per_s", speed],
    ["Gain", "gain", gain], ["Accepted", "acceptance_rate", percent], ["Tokens/round", "tokens_per_round", fixed(2)],
    ["Prompt", "prompt_tokens", whole], ["Cached", "cached", whole], ["First token", "time_to_first_token_s", seconds],
    ["Ended by", "stop_reason", String],
  ];

  function row(answer) {
    const line = document.createElement("tr");
    line.setAttribute("role", "row");
    for (const [label, field, shown] of columns) {
      const cell = document.createElement("td");
      cell.setAttribute("role", "cell");
      cell.dataset.label = label;
      if (field === "stop_reason") cell.className = "word";
      cell.textContent = shown(answer[field]);
      line.append(cell);
    }
    return line;
  }

  let newest = -1;
  function show({ answers, totals, target, now }) {
    $("now").textContent = `${counted(now.running, "answer")} running, ${whole(now.waiting)} waiting`
      + (now.answers_per_batch === null ? "." : `; ${now.answers_per_batch.toFixed(2)} answers per batch of the target so far.`);
    $("target").textContent = !target ? "" : `Target without drafts: ${speed(target.tokens_per_s)} tokens/s`
      + (target.expected === null ? "" : `, expected ${speed(target.expected)}`)
      + (target.reason ? ` (${target.reason})` : "") + ".";
    $("target").className = target && target.state === "slower" ? "warning" : "muted";
    $("totals").textContent = totals.answers
      ? `${counted(totals.answers, "answer")}, ${counted(totals.tokens, "token")}, ${whole(totals.accepted)} of `
        + `${counted(totals.drafted, "drafted token")} accepted, ${counted(totals.refused, "request")} refused, `
        + `${counted(totals.restarts, "restart")}`
      : "No answer yet.";
    $("tiles").hidden = $("answers").hidden = !answers.length;
    if (!answers.length || answers[0].number === newest) return;
    newest = answers[0].number;
    for (const tile of document.querySelectorAll("[data-tile]")) {
      tile.textContent = tiles[tile.dataset.tile](answers[0][tile.dataset.tile]);
    }
    $("answers").tBodies[0].replaceChildren(...answers.map(row));
  }

  const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

  async function poll() {
    clearTimeout(timer);
    let wait = POLL_MS;
    try {
      const response = await request("figures", { headers: headers({}), cache: "no-store" });
      if (response.status === 401) {
        askForKey();
        return;  // until the user enters another key
      }
      if (!response.ok) throw new Error(await refusal(response));
      show(await response.json());
      $("link").textContent = "";
      if (!$("key-form").hidden) {
        $("key-form").hidden = true;
        $("prompt").focus();
      }
    } catch (error) {
      wait = SLOW_MS;
      $("link").textContent = `No statistics: ${error.message}.`;
    }
    if (!document.hidden) timer = setTimeout(poll, wait);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && $("key-form").hidden) poll();
  });

  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    $("key").value = "";
    if (key) poll();
  });

  // ---- one prompt ----------------------------------------------------------------------------------------------

  /* Yields the values of a stream of server-sent events, up to its end or [DONE]. */
  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  }

  /* Shows a growing text, updating at most once per frame. */
  function grower(element, box) {
    let text = "", asked = false;
    const draw = () => {
      asked = false;
      element.textContent = text;
    };
    return {
      clear() { text = ""; draw(); box.hidden = true; },
      push(more) {
        if (!more) return;
        text += more;
        box.hidden = false;
        if (!asked) {
          asked = true;
          requestAnimationFrame(draw);
        }
      },
      draw,
    };
  }

  const answer = grower($("answer"), $("answer")), reasoning = grower($("reasoning"), $("reasoning-box"));

  function body(prompt) {
    const asked = { model, stream: true, stream_options: { include_usage: true } };
    if ($("most").value) asked.max_tokens = Number($("most").value);
    if ($("temperature").value) asked.temperature = Number($("temperature").value);
    return chat ? { ...asked, messages: [{ role: "user", content: prompt }] } : { ...asked, prompt };
  }

  function busy(on) {
    const here = document.activeElement;
    $("answer").setAttribute("aria-busy", String(on));
    $("stop").disabled = !on;
    $("send").disabled = on;
    if (on && here === $("send")) $("stop").focus();
    if (!on && here === $("stop")) $("send").focus();
  }

  const ends = { stop: "finished", length: "cut off at the maximum number of tokens", tool_calls: "calls a tool" };

  async function ask() {
    const prompt = $("prompt").value;
    if (running || !prompt.trim()) {
      if (!running) $("prompt").focus();
      return;
    }
    const here = running = new AbortController();
    let ended = "", usage = null, answered = false;
    answer.clear();
    reasoning.clear();
    $("answer").hidden = false;
    $("fault").textContent = "";
    $("state").textContent = "Answering …";
    busy(true);
    try {
      const response = await request(chat ? "v1/chat/completions" : "v1/completions", {
        method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body(prompt)),
        signal: here.signal,
      });
      if (response.status === 401) {
        askForKey();
        throw new Error("the endpoint requires its key");
      }
      if (!response.ok) throw new Error(await refusal(response));
      answered = true;
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message || "the endpoint gave no reason");
        usage = event.usage || usage;
        for (const choice of event.choices || []) {
          const delta = choice.delta || {};
          reasoning.push(delta.reasoning_content || delta.reasoning);
          answer.push(chat ? delta.content : choice.text);
          ended = choice.finish_reason || ended;
        }
      }
      $("state").textContent = ended
        ? `Answer ${ends[ended] || ended}${usage ? `, ${counted(usage.completion_tokens, "token")}` : ""}.`
        : "The answer broke off.";
    } catch (error) {
      $("state").textContent = here.signal.aborted ? "Stopped." : "";
      if (!here.signal.aborted) {
        $("fault").textContent = answered ? `The answer broke off: ${error.message}.` : `No answer: ${error.message}.`;
      }
    } finally {
      answer.draw();
      reasoning.draw();
      $("answer").hidden = !$("answer").textContent;
      running = null;
      busy(false);
      if ($("key-form").hidden) poll();
    }
  }

  const stop = () => running && running.abort();

  $("try").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  $("stop").addEventListener("click", stop);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });

  $("base").textContent = new URL("v1", location.href).href;
  poll();
})();

"""From settings to a loaded pair: pairs (spec to opened pair), options, plan, resolve; repository; python."""

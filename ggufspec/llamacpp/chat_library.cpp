// llama.cpp's own chat library behind C functions: JSON in, JSON out. What common/chat.h has takes C++ values.
// Compiled by ggufspec doctor --chat-library against the headers of the llama.cpp that is installed. No exception leaves a
// function: a text that begins with "!" is an error's, and a null comes with one. Texts are freed with chat_free.
#include "chat.h"
#include "json-schema-to-grammar.h"
#include "log.h"

#include <cstring>

namespace {

using json = common_json;

char * copy(const std::string & text) { return strdup(text.c_str()); }

template <typename Work> char * answer(Work work) {
    json found;
    try {
        work(found);
        return copy(found.dump_safe());
    } catch (const std::exception & error) {
        return copy(std::string("!") + error.what());
    }
}

template <typename Work> void * made(char ** error, Work work) {
    try {
        return work();
    } catch (const std::exception & failure) {
        *error = copy(failure.what());
    }
    return nullptr;
}

struct Reader {  // of one answer; the message as far as it was read
    common_chat_parser_params params;
    common_chat_msg           message;
    std::string               text;
};
}  // namespace

extern "C" {
void chat_free(char * text) { free(text); }
// A template, compiled; to be closed.
void * chat_open(const char * source, const char * bos, const char * eos, char ** error) {
    common_log_set_verbosity_thold(LOG_LEVEL_OUTPUT);  // it would warn on stderr
    return made(error, [&]() -> void * { return common_chat_templates_init(nullptr, source, bos, eos).release(); });
}

void chat_close(void * templates) { common_chat_templates_free(static_cast<common_chat_templates *>(templates)); }

// The prompt of a request, and how its answer is constrained and read.
char * chat_apply(void * handle, const char * request) {
    return answer([&](json & out) {
        auto * templates = static_cast<common_chat_templates *>(handle);
        auto body = json::parse(request);
        auto caps = common_chat_templates_get_caps(templates);
        common_chat_templates_inputs in;
        in.messages = common_chat_msgs_parse_oaicompat(body.at("messages"));
        if (body.contains("tools")) in.tools = common_chat_tools_parse_oaicompat(body.at("tools"));
        in.tool_choice           = common_chat_tool_choice_parse_oaicompat(body.value("tool_choice", "auto"));
        in.json_schema           = body.value("json_schema", "");
        in.grammar               = body.value("grammar", "");
        in.parallel_tool_calls   = body.value("parallel_tool_calls", caps["supports_parallel_tool_calls"]);
        in.enable_thinking       = body.value("enable_thinking", true);
        in.add_generation_prompt = body.value("add_generation_prompt", true);
        in.reasoning_format      = common_reasoning_format_from_name(body.value("reasoning_format", "auto"));
        if (body.value("continue", false)) {
            in.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO;
            in.add_generation_prompt  = false;
        }
        if (body.contains("now")) in.now = std::chrono::system_clock::from_time_t(body.at("now").get<int64_t>());
        for (const auto & item : body.at("options").items()) in.chat_template_kwargs[item.key()] = item.value().dump();
        auto found = common_chat_templates_apply(templates, in);
        out["prompt"]            = found.prompt;
        out["grammar"]           = found.grammar;
        out["lazy"]              = found.grammar_lazy;
        out["generation_prompt"] = found.generation_prompt;
        out["thinking_start"]    = found.thinking_start_tag;
        out["thinking_ends"]     = found.thinking_end_tags;
        out["preserved"]         = found.preserved_tokens;
        out["stops"]             = found.additional_stops;
        out["format"]            = static_cast<int>(found.format);
        out["parser"]            = found.parser;
        auto triggers            = json::array();
        for (const auto & trigger : found.grammar_triggers) {
            triggers.push_back(json::array({static_cast<int>(trigger.type), trigger.value}));
        }
        out["triggers"] = triggers;
    });
}

// Reads one answer of what was applied; to be closed.
void * chat_reader(const char * applied, char ** error) {
    return made(error, [&]() -> void * {
        auto body   = json::parse(applied);
        auto reader = std::make_unique<Reader>();
        auto & params            = reader->params;
        params.format            = static_cast<common_chat_format>(body.at("format").get<int>());
        params.reasoning_format  = common_reasoning_format_from_name(body.value("reasoning_format", "auto"));
        params.generation_prompt = body.value("generation_prompt", "");
        params.parse_tool_calls  = body.value("tools", true);
        params.is_continuation   = body.value("continue", false);
        if (auto parser = body.value("parser", ""); !parser.empty()) params.parser.load(parser);
        if (params.is_continuation) reader->message = common_chat_parse("", true, params);  // what it goes on with
        return reader.release();
    });
}

void chat_reader_close(void * reader) { delete static_cast<Reader *>(reader); }

// What a piece of an answer adds to its message. One that adds nothing is not read yet, and belongs to the next one.
char * chat_read(void * handle, const char * piece, int final) {
    return answer([&](json & out) {
        auto * reader = static_cast<Reader *>(handle);
        auto text = reader->text + piece;
        auto found = common_chat_parse(text, !final, reader->params);
        auto deltas = json::array();
        for (const auto & diff : common_chat_msg_diff::compute_diffs(reader->message, found)) {
            auto call = diff.tool_call_index;
            if (call == std::string::npos && diff.content_delta.empty() && diff.reasoning_content_delta.empty()) continue;
            json one;
            one["reasoning"] = diff.reasoning_content_delta;
            one["content"]   = diff.content_delta;
            one["call"]      = call == std::string::npos ? -1 : static_cast<int>(call);
            one["id"]        = diff.tool_call_delta.id;
            one["name"]      = diff.tool_call_delta.name;
            one["arguments"] = diff.tool_call_delta.arguments;
            deltas.push_back(one);
        }
        out["deltas"] = deltas;
        if (!deltas.empty()) { reader->text = text; reader->message = found; }
    });
}

// The grammar of a JSON schema.
char * chat_schema(const char * schema) {
    return answer([&](json & out) { out["grammar"] = json_schema_to_grammar(json::parse(schema)); });
}

// Advance a grammar; 0 where it does not take the token, which llama.cpp's own function throws.
int chat_accept(void * sampler, int token) {
    try {
        llama_sampler_accept(static_cast<llama_sampler *>(sampler), token);
        return 1;
    } catch (const std::exception &) {
        return 0;
    }
}
}

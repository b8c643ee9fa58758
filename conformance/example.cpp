// The kit read by C++17 alone: inverse frequencies and magnitudes by this file's own inv_freq, for five rope types.
//
//     g++ -std=c++17 -O1 -o example example.cpp && ./example conformance
//
// Put the function of your program in place of `inv_freq` below. The exit status is 1 where a row differs.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

// --- JSON, as much of it as the kit has ---------------------------------------------------------------------------

struct Json {
    enum { Null, Number, Text, List, Object } kind = Null;
    double number = 0;  // true and false are 1 and 0
    std::string text;
    std::vector<Json> list;
    std::map<std::string, Json> object;

    bool has(const std::string &key) const { return object.count(key) && object.at(key).kind != Null; }
    const Json &operator[](const std::string &key) const { return object.at(key); }
    double get(const std::string &key, double otherwise) const { return has(key) ? object.at(key).number : otherwise; }
    std::vector<double> numbers() const {
        std::vector<double> values;
        for (const Json &each : list) values.push_back(each.number);
        return values;
    }
};

struct Reader {
    const char *at;

    void space() {
        while (*at == ' ' || *at == '\n' || *at == ',' || *at == ':') at++;
    }
    std::string word() {  // the kit's texts have no quotation marks; other escapes are kept as they are
        std::string text;
        for (at++; *at != '"'; at++) text += *at;
        at++;
        return text;
    }
    Json value() {
        Json made;
        space();
        if (*at == '{') {
            made.kind = Json::Object;
            for (at++, space(); *at != '}'; space()) {
                std::string key = word();
                made.object[key] = value();
            }
            at++;
        } else if (*at == '[') {
            made.kind = Json::List;
            for (at++, space(); *at != ']'; space()) made.list.push_back(value());
            at++;
        } else if (*at == '"') {
            made.kind = Json::Text;
            made.text = word();
        } else if (*at == 'n') {
            at += 4;
        } else {
            made.kind = Json::Number;
            char *end;
            if (*at == 't') made.number = 1, at += 4;
            else if (*at == 'f') at += 5;
            else made.number = std::strtod(at, &end), at = end;
        }
        return made;
    }
};

Json read(const std::filesystem::path &path) {
    std::ifstream file(path);
    std::string text((std::istreambuf_iterator<char>(file)), {});
    return Reader{text.c_str()}.value();
}

// --- the port: replace this by your program -----------------------------------------------------------------------

struct Rope {
    std::vector<double> inv_freq;
    double magnitude = 1;
};

const double kTwoPi = 2 * 3.14159265358979323846;

// False: this example does not offer the config.
bool inv_freq(const Json &config, Rope &out) {
    const Json &text = config.has("text_config") ? config["text_config"] : config;
    if (text.has("qk_rope_head_dim") || text["model_type"].text == "gpt_neox") return false;
    const bool merged = text.has("rope_parameters");
    const Json none, &settings = merged ? text["rope_parameters"] : text.has("rope_scaling") ? text["rope_scaling"] : none;
    const char *key = settings.has("rope_type") ? "rope_type" : "type";
    const std::string type = settings.has(key) ? settings[key].text : "default";
    const double theta = merged ? settings.get("rope_theta", 0) : text.get("rope_theta", 0);
    const double head = text.get("head_dim", text.get("hidden_size", 0) / text.get("num_attention_heads", 1));
    const double part = settings.get("partial_rotary_factor", text.get("partial_rotary_factor", 1));
    const int dim = int(head * part);
    const double s = settings.get("factor", 1), original = settings.get("original_max_position_embeddings", 1);
    for (int i = 0; i < dim; i += 2) out.inv_freq.push_back(std::pow(theta, -double(i) / dim));
    if (type == "default" || type == "mrope") return true;
    if (type == "linear") {
        for (double &f : out.inv_freq) f /= s;
        return true;
    }
    if (type == "llama3") {
        const double low = settings["low_freq_factor"].number, high = settings["high_freq_factor"].number;
        for (double &f : out.inv_freq) {
            const double turns = original * f / kTwoPi;
            const double kept = turns > high ? 1 : turns < low ? 0 : (turns - low) / (high - low);
            f = kept * f + (1 - kept) * f / s;
        }
        return true;
    }
    if (type == "yarn") {
        auto index = [&](double turns) { return dim * std::log(original / (turns * kTwoPi)) / (2 * std::log(theta)); };
        double low = index(settings.get("beta_fast", 32)), high = index(settings.get("beta_slow", 1));
        if (settings.get("truncate", 1)) low = std::floor(low), high = std::ceil(high);
        low = std::max(low, 0.0), high = std::min(high, dim - 1.0);
        if (low == high) high += 0.001;
        for (int i = 0; i < dim / 2; i++) {
            const double ramp = std::min(1.0, std::max(0.0, (i - low) / (high - low)));
            out.inv_freq[i] *= ramp / s + (1 - ramp);
        }
        auto g = [&](const char *key) { return 0.1 * settings[key].number * std::log(s) + 1; };
        out.magnitude = 0.1 * std::log(s) + 1;
        if (settings.get("mscale", 0) && settings.get("mscale_all_dim", 0)) out.magnitude = g("mscale") / g("mscale_all_dim");
        out.magnitude = settings.get("attention_factor", out.magnitude);
        return true;
    }
    return false;
}

// --- the comparison -----------------------------------------------------------------------------------------------

bool near(double a, double b, double relative) { return std::fabs(a - b) <= relative * std::fabs(b); }

bool all_near(const std::vector<double> &a, const std::vector<double> &b, double relative) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](double x, double y) { return near(x, y, relative); });
}

int main(int count, char **words) {
    const std::filesystem::path kit = count > 1 ? words[1] : ".";
    const Json allowed = read(kit / "kit.json")["tolerances"]["float64"];
    int agree = 0, differ = 0, left = 0;
    std::vector<std::filesystem::path> files;
    for (const auto &each : std::filesystem::directory_iterator(kit / "configurations")) files.push_back(each.path());
    std::sort(files.begin(), files.end());
    for (const auto &file : files) {
        const Json entry = read(file);
        for (const Json &row : entry["rows"].list) {
            Rope rope;
            if (row.has("layer_type") || row.has("length") || !inv_freq(entry["config"], rope)) {
                left++;
                continue;
            }
            const std::vector<double> right = row["inv_freq"].numbers();
            const bool same = all_near(rope.inv_freq, right, allowed["inv_freq"].number);
            if (same && near(rope.magnitude, row["magnitude"].number, allowed["magnitude"].number)) {
                agree++;
                continue;
            }
            differ++;
            std::printf("%s differs in its %s", file.stem().c_str(), same ? "magnitude" : "frequencies");
            std::vector<double> some;
            for (const Json &pair : row["pairs"].list)
                if (pair.number < rope.inv_freq.size()) some.push_back(rope.inv_freq[int(pair.number)]);
            for (const Json &mistake : row["mistakes"].list) {
                const bool frequencies = !same && mistake.has("inv_freq");
                if (frequencies ? all_near(some, mistake["inv_freq"].numbers(), 1e-8)
                                : same && mistake.has("magnitude") && near(rope.magnitude, mistake["magnitude"].number, 1e-8))
                    std::printf("; as with: %s", mistake["name"].text.c_str());
            }
            std::printf("\n");
        }
    }
    std::printf("%d agree, %d differ, %d not offered\n", agree, differ, left);
    return differ > 0;
}

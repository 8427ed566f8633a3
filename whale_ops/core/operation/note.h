// What ranks tell each other about an operation in words, with its first message.
#pragma once

#include <string>
#include <vector>

#include "whale_ops/core/operation/request.h"

namespace whale {

struct Note {
  std::string key;
  std::string descriptor;
  std::string alone;
  std::vector<int64_t> dims;
};

std::string make_note(const Request& request, const std::string& descriptor);
Note parse_note(const std::string& bytes);
// Everything that all ranks must agree on.
std::string describe(const Request& request);

}  // namespace whale

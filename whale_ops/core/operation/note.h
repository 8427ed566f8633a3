// The description of an operation that ranks send each other with its first message, to detect that
// they run different ones.
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
// Returns a text of everything that all ranks must agree on.
std::string describe(const Request& request);

}  // namespace whale

// Exchanges between devices in groups that overlap. The devices are the host's memory: they carry
// out what they are given some time later, and refuse orders of starts that would wait for each
// other.
#include <memory>

#include "tests/whale_ops/core/overlapping_groups.h"

extern "C" const whale::DevicePlugin whale_device_plugin;  // host_device.cc

namespace {

int first_device(int) { return 0; }

}  // namespace

void overlapping_groups(int size, int orders, unsigned seed, const char* transport) {
  Ranks ranks("overlapping groups " + std::to_string(size) + transport, size, whale_device_plugin,
              transport, first_device);
  ranks.each([&](int rank) {
    const auto device = ranks.device(rank);
    const auto start = [&](const Flight& flight, const Step& next, const Step& ended) {
      whale::DeviceCall call;
      call.text = std::to_string(flight.exchange.count);
      call.what = flight.side->what;
      call.what.key = flight.exchange.key();
      call.done = [&flight, next, ended](const whale::Status& status) {
        require(status.ok(), status.message);
        require(flight.side->output == flight.side->wanted,
                "devices exchange what they should: " + flight.exchange.key());
        next();
        ended();
      };
      device->start(std::move(call));
    };
    in_random_orders(rank, size, orders, seed, start);
  });
}

// Nothing that is under way on any rank outlives the loss of one, whoever waits for whom.
void devices_that_hang(int size) {
  for (const bool lost : {false, true}) {
    Ranks ranks(lost ? "devices that hang, a rank is lost" : "devices that hang, a rank gives up",
                size, whale_device_plugin, "hang", first_device);
    Count failed;
    std::vector<double> values(static_cast<size_t>(size), 1.0);
    for (int rank = 0; rank < size; ++rank) {
      whale::DeviceCall call;
      call.what.key = "pair " + std::to_string(rank / 2);
      call.what.group = {rank / 2 * 2, rank / 2 * 2 + 1};
      call.what.index = rank % 2;
      call.what.dtype = call.what.wire = whale::DType::kFloat64;
      call.what.element_bytes = sizeof(double);
      double* value = &values[static_cast<size_t>(rank)];
      call.what.tensors = {{value, value, 1}};
      call.done = [&failed](const whale::Status& status) {
        require(!status.ok(), "a device that hangs ends nothing");
        failed.up();
      };
      ranks.device(rank)->start(std::move(call));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (lost) {
      for (int rank = 0; rank + 1 < size; ++rank) ranks.endpoint(rank).lose(size - 1, "was killed");
      ranks.endpoint(size - 1).abort(whale::Status::Error(whale::Code::kAborted, "killed"));
    } else {
      ranks.endpoint(size - 1).abort(whale::Status::Error(whale::Code::kAborted, "enough"));
    }
    failed.wait(size, 1.0);
  }
}

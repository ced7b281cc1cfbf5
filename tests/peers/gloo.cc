/* One rank of gloo, as a C++ program uses gloo, measured by the program in collectives/.
 *
 * gloo HOST PORT NAME, with RANK, WORLD_SIZE and GLOO_STORE (a folder that all ranks see) in the
 * environment. Speaks the protocol that mpi.c describes. With "busy" in NAME, the caller's thread polls the
 * pairs of sockets, which gloo calls synchronous mode with busy polling; otherwise gloo's own thread serves
 * them. With "ring" in NAME, a reduction goes around a ring in chunks; otherwise it works by recursive halving
 * and doubling. */
#include <arpa/inet.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr size_t kMaxBytes = size_t{64} << 20;
constexpr int kMaxTimes = 20000;

using Clock = std::chrono::steady_clock;

int number(const char* name) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : -1;
}

std::shared_ptr<gloo::Context> join(gloo::rendezvous::Store& store, int rank, int ranks, bool is_busy) {
  auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
  context->connectFullMesh(store, device);
  for (int peer = 0; is_busy && peer < ranks; peer++) {
    if (peer != rank) context->getPair(peer)->setSync(true, true);
  }
  return context;
}

/* A sender needs the receiver's buffers: no rank continues before all have created their buffers. */
void wait_for_all(gloo::rendezvous::Store& store, int rank, int ranks) {
  std::vector<std::string> keys;
  for (int peer = 0; peer < ranks; peer++) keys.push_back("ready" + std::to_string(peer));
  store.set(keys[rank], {'1'});
  store.wait(keys, std::chrono::seconds(30));
}

}  // namespace

int main(int argc, char** argv) {
  const int rank = number("RANK"), ranks = number("WORLD_SIZE"), core = number("PEER_CORE");
  const char* folder = std::getenv("GLOO_STORE");
  if (argc != 4 || rank < 0 || ranks < 1 || !folder) return 2;
  const char* core_text = std::getenv("PEER_CORE");
  if (core_text && *core_text) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  const std::string self = argv[3];
  const bool is_busy = self.find("busy") != std::string::npos;
  const bool is_ring = self.find("ring") != std::string::npos;

  gloo::rendezvous::FileStore store(folder);
  auto context = join(store, rank, ranks, is_busy);
  gloo::BarrierAllToAll barrier(context);
  wait_for_all(store, rank, ranks);

  std::vector<float> data(kMaxBytes / sizeof(float));
  std::map<size_t, std::unique_ptr<gloo::Algorithm>> reductions;
  auto reduction = [&](size_t bytes) -> gloo::Algorithm& {
    auto& known = reductions[bytes];
    if (!known) {
      const std::vector<float*> buffers{data.data()};
      const int count = std::max<size_t>(1, bytes / sizeof(float));
      if (is_ring) {
        known = std::make_unique<gloo::AllreduceRingChunked<float>>(context, buffers, count);
      } else {
        known = std::make_unique<gloo::AllreduceHalvingDoubling<float>>(context, buffers, count);
      }
      barrier.run();
    }
    return *known;
  };

  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(std::atoi(argv[2]));
  inet_pton(AF_INET, argv[1], &address.sin_addr);
  const int control = socket(AF_INET, SOCK_STREAM, 0), enabled = 1;
  if (connect(control, reinterpret_cast<sockaddr*>(&address), sizeof address)) return 2;
  setsockopt(control, IPPROTO_TCP, TCP_NODELAY, &enabled, sizeof enabled);
  FILE* lines = fdopen(control, "r");
  dprintf(control, "%s %d\n", argv[3], rank);

  std::vector<double> times;
  times.reserve(kMaxTimes);
  char line[128], name[32];
  size_t bytes;
  int count;
  while (fgets(line, sizeof line, lines)) {
    const bool is_order = sscanf(line, "%31s %zu %d", name, &bytes, &count) == 3;
    const std::string operation = name;
    if (!is_order || bytes > kMaxBytes || count < 1 || count > kMaxTimes ||
        (operation != "all_reduce" && operation != "barrier")) {
      dprintf(control, "unsupported\n");
      continue;
    }
    gloo::Algorithm& algorithm = operation == "barrier" ? barrier : reduction(bytes);
    for (int i = 0; i < count / 8; i++) algorithm.run();
    barrier.run();
    times.clear();
    auto last = Clock::now();
    for (int i = 0; i < count; i++) {
      algorithm.run();
      const auto now = Clock::now();
      times.push_back(std::chrono::duration<double, std::micro>(now - last).count());
      last = now;
    }
    std::sort(times.begin(), times.end());
    dprintf(control, "%.4f %.4f %.4f\n", times[count / 2], times[count * 99 / 100], times[0]);
  }
  return 0;
}

package cudasim

import (
	"testing"

	"github.com/purecuda/purecuda/internal/cuapi"
)

// Streams share four queues of downloads, which are in order: what stands behind a
// hold, or is one behind a download, holds the downloads of every fourth stream.
func TestHeldDownloadsHoldOthers(t *testing.T) {
	for _, c := range []struct {
		name   string
		first  []string // what the first stream is given
		stands bool     // whether the fourth one behind it stands still
	}{
		{"a hold behind a download", []string{"download", "hold"}, true},
		{"a download behind a hold", []string{"download", "fill", "hold", "download"}, true},
		{"the first download of a stream", []string{"hold", "download"}, false},
		{"a fill", []string{"download", "fill", "hold", "fill"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, Config{})
			dev := r.device(64)
			var streams []cuapi.Stream
			var hosts []cuapi.HostPtr
			for range 5 {
				h, _ := r.pinned(64)
				streams, hosts = append(streams, r.stream()), append(hosts, h)
			}
			for _, what := range c.first {
				switch what {
				case "hold":
					r.sim.Hold(uintptr(streams[0]))
				case "download":
					r.ok(r.MemcpyDtoHAsync(hosts[0], dev, 64, streams[0]))
				case "fill":
					r.ok(r.MemsetD8Async(dev, 1, 64, streams[0]))
				}
			}
			for i, s := range streams[1:] {
				r.ok(r.MemcpyDtoHAsync(hosts[i+1], dev, 64, s))
				want := cuapi.Success
				if i == 3 && c.stands {
					want = cuapi.NotReady
				}
				r.want(want, r.StreamQuery(s))
			}
			r.want(cuapi.NotReady, r.StreamQuery(streams[0]))
			r.sim.ReleaseAll()
			for _, s := range streams {
				r.want(cuapi.Success, r.StreamQuery(s))
			}
		})
	}
}

// A hold that is released in stepped mode leaves the queue that it was in.
func TestReleasedHoldLeavesItsQueue(t *testing.T) {
	r := newRig(t, Config{})
	dev, st := r.device(64), r.stream()
	host, _ := r.pinned(64)
	r.sim.SetStepped(true)
	r.ok(r.MemcpyDtoHAsync(host, dev, 64, st))
	r.sim.Hold(uintptr(st))
	r.ok(r.MemcpyDtoHAsync(host, dev, 64, st))
	r.sim.Release(uintptr(st))
	for range 2 {
		if !r.sim.Step() {
			t.Fatal("nothing to step")
		}
	}
	r.want(cuapi.Success, r.StreamQuery(st))
}

// Command heldstreams tells which streams stand still beside one that is held:
// for each kind of operation before the hold, behind it, and in the other streams,
// how many of these do not complete while the hold lasts. It needs a GPU.
package main

import (
	"flag"
	"fmt"
	"log"
	"runtime"
	"strings"
	"time"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/hold"
	"github.com/purecuda/purecuda/internal/wire"
)

var (
	others  = flag.Int("streams", 16, "streams beside the held one; the legacy stream is one more")
	size    = flag.Int("size", 1<<16, "bytes of each operation")
	patient = flag.Duration("patience", 50*time.Millisecond, "how long a stream may take before it counts as standing still")
)

type machine struct {
	*cuapi.Table
	ctx  *driver.Context
	dev  []cuapi.DevicePtr
	host []cuapi.HostPtr
	dev2 cuapi.DevicePtr
}

func main() {
	log.SetFlags(0)
	flag.Parse()
	runtime.LockOSThread()
	drv, err := driver.Open()
	check(err)
	dev, err := drv.Device(0)
	check(err)
	ctx, err := dev.Primary()
	check(err)
	m := &machine{Table: wire.Table(drv), ctx: ctx}
	m.ok(m.CtxSetCurrent(wire.ContextOf(ctx).Raw))
	streams := make([]cuapi.Stream, *others+2) // the held one, the others, the legacy stream
	events := make([]cuapi.Event, len(streams))
	for i := range streams {
		if i < len(streams)-1 {
			m.ok(m.StreamCreate(&streams[i], cuapi.StreamNonBlocking))
		}
		m.ok(m.EventCreate(&events[i], cuapi.EventDisableTiming))
		d, h := new(cuapi.DevicePtr), new(cuapi.HostPtr)
		m.ok(m.MemAlloc(d, uintptr(*size)))
		m.ok(m.MemHostAlloc(h, uintptr(*size), 0))
		m.dev, m.host = append(m.dev, *d), append(m.host, *h)
	}
	m.ok(m.MemAlloc(&m.dev2, uintptr(*size)))
	kinds := []string{"nothing", "fill", "upload", "download", "copy"}
	fmt.Println("| before the hold | behind it | in the others | standing still |")
	fmt.Println("|---|---|---|---|")
	bad := 0
	for _, before := range kinds {
		for _, behind := range kinds {
			for _, other := range kinds[1:] {
				m.do(before, 0, streams[0])
				release, err := hold.Stream(ctx, uintptr(streams[0]))
				check(err)
				m.do(behind, 0, streams[0])
				for i := 1; i < len(streams); i++ {
					m.do(other, i, streams[i])
					m.ok(m.EventRecord(events[i], streams[i]))
				}
				var still []string
				deadline := time.Now().Add(*patient)
				for i := 1; i < len(streams); i++ {
					r := m.EventQuery(events[i])
					for r == cuapi.NotReady && time.Now().Before(deadline) {
						r = m.EventQuery(events[i])
					}
					if r == cuapi.NotReady {
						name := fmt.Sprint(i)
						if streams[i] == 0 {
							name = "legacy"
						}
						still = append(still, name)
					}
				}
				release()
				m.ok(m.CtxSynchronize())
				if len(still) > 0 {
					bad++
					fmt.Printf("| %s | %s | %s | %s |\n", before, behind, other, strings.Join(still, " "))
				}
			}
		}
	}
	fmt.Printf("\n%d of %d combinations had streams that stood still for %v, of %d and the legacy one, with %d bytes.\n", bad, len(kinds)*len(kinds)*(len(kinds)-1), *patient, *others, *size)
}

func (m *machine) do(what string, i int, s cuapi.Stream) {
	n := uintptr(*size)
	switch what {
	case "fill":
		m.ok(m.MemsetD8Async(m.dev[i], 1, n, s))
	case "upload":
		m.ok(m.MemcpyHtoDAsync(m.dev[i], m.host[i], n, s))
	case "download":
		m.ok(m.MemcpyDtoHAsync(m.host[i], m.dev[i], n, s))
	case "copy":
		m.ok(m.MemcpyDtoDAsync(m.dev2, m.dev[i], n, s))
	}
}

func (m *machine) ok(r cuapi.Result) {
	if r != cuapi.Success {
		log.Fatal(driver.Result(r))
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

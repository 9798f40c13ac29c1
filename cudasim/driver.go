package cudasim

import (
	"fmt"
	"sync"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// drivers are the drivers of the simulators that are not closed.
var drivers = struct {
	sync.Mutex
	of map[*Sim]*driver.Driver
}{of: map[*Sim]*driver.Driver{}}

// Driver initializes the simulated driver and returns it as purecuda's, as
// driver.Open does with a real one: the same each time. A simulator whose Driver
// was called stays in memory until it is closed.
func (s *Sim) Driver() (*driver.Driver, error) {
	drivers.Lock()
	defer drivers.Unlock()
	if r := s.table.Init(0); r != cuapi.Success {
		return nil, fmt.Errorf("cudasim: cuInit: %w", driver.Result(r))
	}
	if d := drivers.of[s]; d != nil {
		return d, nil
	}
	d, err := wire.NewDriver(s.table, "simulator")
	if err != nil {
		return nil, err
	}
	for sim := range drivers.of {
		if sim.isClosed() {
			delete(drivers.of, sim)
		}
	}
	drivers.of[s] = d.(*driver.Driver)
	return d.(*driver.Driver), nil
}

func (s *Sim) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

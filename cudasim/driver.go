package cudasim

import (
	"fmt"

	"github.com/purecuda/purecuda/driver"
	"github.com/purecuda/purecuda/internal/cuapi"
	"github.com/purecuda/purecuda/internal/wire"
)

// Driver initializes the simulated driver and returns it as purecuda's, as
// driver.Open does with a real one: the same each time.
func (s *Sim) Driver() (*driver.Driver, error) {
	s.opening.Lock()
	defer s.opening.Unlock()
	if r := s.table.Init(0); r != cuapi.Success {
		return nil, fmt.Errorf("cudasim: cuInit: %w", driver.Result(r))
	}
	if s.opened == nil {
		d, err := wire.NewDriver(s.table, "simulator")
		if err != nil {
			return nil, err
		}
		s.opened = d.(*driver.Driver)
	}
	return s.opened, nil
}

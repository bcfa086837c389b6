const { SMTPServer } = require('smtp-server');
new SMTPServer({ authOptional: true, disabledCommands: ['STARTTLS'], socketTimeout: 3600e3 }).listen(8000);
